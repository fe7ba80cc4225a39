"""The tests' own promises: an honest skip, and a world put back as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launching import launch, run_command, run_script

TESTS = Path(__file__).parents[1]
SKIPS = """
import pytest

def test_with_a_tool_that_nobody_has(needs_tool):
    needs_tool("no-such-tool")

def test_with_a_package_that_nobody_has():
    pytest.importorskip("no_such_package")

@pytest.mark.gpu
def test_with_a_device(monkeypatch):
    pass

def test_with_a_tool_that_everybody_has(needs_tool):
    assert needs_tool("sh").endswith("sh")
    assert needs_tool("torch") == "torch"
"""
MESS = """
import os, random
import numpy, torch

BEFORE = random.getstate(), torch.get_rng_state()

def test_that_leaves_a_mess():
    os.environ["LEFT_BEHIND"] = "1"
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from anytrain import Accelerator
    Accelerator(cpu=True)

def test_that_finds_none():
    from anytrain.engine.assemble import current
    assert "LEFT_BEHIND" not in os.environ
    assert not torch.distributed.is_initialized()
    assert random.getstate() == BEFORE[0]
    assert torch.equal(torch.get_rng_state(), BEFORE[1])
    assert current.get() is None
"""


SIGNALS = """
import signal, subprocess, sys
import pytest

def test_that_presses_ctrl_c():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_that_sends_a_signal_to_a_child(name):
    raises = f"import signal; signal.raise_signal(signal.{name})"
    assert subprocess.run([sys.executable, "-c", raises]).returncode == -getattr(signal, name)

def test_that_outlives_its_terminal():
    signal.raise_signal(signal.SIGHUP)
"""
# As a shell starts what is to run behind: `nohup make test &`.
IGNORING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


def run_tests(
    text: str, folder: Path, *, through: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    (folder / "test_planted.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    command = [*through, sys.executable, "-m", "pytest", "-ra", "-p", "conftest", folder]
    env = {"PYTHONPATH": str(TESTS), "CUDA_VISIBLE_DEVICES": "", **env}
    return run_command(command, cwd=folder, env=env, check=False)


def test_what_a_machine_lacks_is_skipped_with_its_reason(tmp_path: Path) -> None:
    told = run_tests(SKIPS, tmp_path)
    assert told.returncode == 0
    assert "1 passed, 3 skipped" in told.stdout
    assert "tool absent: no-such-tool" in told.stdout
    assert "no CUDA device here" in told.stdout


def test_where_tools_are_required_only_a_device_may_be_missing(tmp_path: Path) -> None:
    told = run_tests(SKIPS, tmp_path, ANYTRAIN_REQUIRE_TOOLS="1")
    assert told.returncode == 1
    assert "2 failed, 1 passed, 1 skipped" in told.stdout


def test_where_tools_are_required_a_whole_file_may_not_be_skipped(tmp_path: Path) -> None:
    whole = "import pytest\npytest.importorskip('no_such_package')\n"
    assert run_tests(whole, tmp_path).returncode == 5
    assert run_tests(whole, tmp_path, ANYTRAIN_REQUIRE_TOOLS="1").returncode == 2


def test_a_test_leaves_nothing_for_the_next_one(tmp_path: Path) -> None:
    told = run_tests(MESS, tmp_path)
    assert told.returncode == 0, told.stdout


def test_tests_of_signals_may_run_where_signals_are_ignored(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IGNORING]
    told = run_tests(SIGNALS, tmp_path, through=command)
    assert told.returncode == 0, told.stdout


def test_a_script_runs_as_several_processes() -> None:
    script = """
    import sys
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} got {sys.argv[1]}")
    dist.destroy_process_group()
    """
    told = launch(script, 2, "a word").stdout
    assert sorted(told.splitlines()) == [f"rank {r} of 2 got a word" for r in (0, 1)]


def test_programs_are_forked_also_where_python_writes_unbuffered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    script = "import gc; print(gc.get_freeze_count() > 0)"  # as the process that forks has it
    assert run_script(script).stdout == "True\n"
    assert run_command([sys.executable, "-c", script]).stdout == "True\n"
    assert run_script(script, fresh=True).stdout == "False\n"


def test_a_script_that_fails_or_hangs_shows_what_it_said() -> None:
    with pytest.raises(AssertionError, match="(?s)exited 3.*last words"):
        run_script("import sys; print('last words'); sys.exit(3)")
    with pytest.raises(AssertionError, match="(?s)ran past 6 s.*last words"):
        run_script("import time; print('last words', flush=True); time.sleep(600)", timeout=6)
