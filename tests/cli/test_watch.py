"""`anytrain watch` on real runs, as a person meets it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from launching import child_environment, run_command, script_file
from slow_training import TRAINING

WATCH = (sys.executable, "-m", "anytrain", "watch")
NOT_FOUND = "import sys; sys.modules['torch'] = None; from anytrain.cli.main import run; run()"


@pytest.fixture(scope="module")
def script() -> Iterator[Path]:
    with script_file(TRAINING) as path:
        yield path


def start(*command: object, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(word) for word in command],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,  # type: ignore[call-overload]
    )


@dataclass
class Endless:
    """A run that goes on until it is killed."""

    folder: Path
    process: subprocess.Popen[str]


@pytest.fixture(scope="module")
def run(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endless]:
    """A run that goes on for as long as the tests here, which share it."""
    folder = tmp_path_factory.mktemp("runs") / "endless"
    training = start(sys.executable, script, folder, 1_000_000)
    try:
        until = time.monotonic() + 60
        while "loss" not in _text(folder / "metrics.jsonl"):
            assert training.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        yield Endless(folder, training)
    finally:
        training.kill()
        training.wait()


@pytest.fixture
def endless(run: Endless) -> Iterator[Path]:
    """The folder of a run that no watcher may disturb."""
    yield run.folder
    assert run.process.poll() is None, "a watcher has touched the run"


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def test_a_pipe_gets_lines_from_before_the_run_begins_to_its_end(
    script: Path, tmp_path: Path
) -> None:
    watching = start(*WATCH, tmp_path / "run")
    run_command([sys.executable, script, tmp_path / "run", 60])
    out, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0].startswith("Waiting for the record of a run in ")
    steps = [int(found[1]) for line in lines if (found := re.match(r"step (\d+)/60 ", line))]
    assert steps == sorted(set(steps)) and steps[-1] == 60
    assert "Training done" in lines
    assert any(re.fullmatch(r"  results +.*run", line) for line in lines)


def test_once_prints_how_a_run_stands_without_torch(endless: Path) -> None:
    words = [sys.executable, "-c", NOT_FOUND, "watch", endless, "--once"]
    said = run_command(words).stdout.splitlines()
    assert re.match(r"endless: running; process \d+, last heard \d:\d\d ago", said[0])
    assert re.match(r"training .* \d+/1000000 +0%  \d+:\d\d", said[1])
    assert "loss 0." in said[2] and "samples/s" in said[2]
    assert re.match(r"time  \w+ \d+%", said[3])


def test_it_leaves_when_nobody_reads_its_lines_any_more(endless: Path) -> None:
    watching = start(*WATCH, endless)
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.stdout.close()
    assert watching.wait(timeout=60) == 0


def test_once_refuses_a_folder_without_a_record(tmp_path: Path) -> None:
    done = run_command([*WATCH, tmp_path, "--once"], check=False)
    assert done.returncode == 2
    assert "There is no record of a run" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_in_a_terminal_it_draws_bars_and_q_leaves_it_in_order(endless: Path) -> None:
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    before = termios.tcgetattr(theirs)
    env = {**child_environment(), "TERM": "xterm"}
    command = [*WATCH, str(endless)]
    watching = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    try:
        drawn = ""
        until = time.monotonic() + 60
        while drawn.count("training ") < 3 and time.monotonic() < until:
            drawn += os.read(ours, 2**16).decode(errors="replace")
        os.write(ours, b"q")
        assert watching.wait(timeout=30) == 0
        os.set_blocking(ours, False)
        with suppress(BlockingIOError):
            while True:
                drawn += os.read(ours, 2**16).decode(errors="replace")
        assert "━" in drawn or "╌" in drawn
        assert "loss" in drawn and "time  " in drawn and "samples/s" in drawn
        assert drawn.endswith("\r\x1b[J")  # nothing is left below the cursor
        assert termios.tcgetattr(theirs)[:4] == before[:4]
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
        os.close(theirs)


def test_the_page_s_address_is_printed_and_ctrl_c_ends_it_without_a_complaint(
    endless: Path,
) -> None:
    serving = start(*WATCH, endless, "--web", start_new_session=True)
    try:
        assert serving.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", serving.stdout.readline())
        assert address is not None
        with urlopen(address[0], timeout=30) as answer:
            assert b"endless" in answer.read()
        serving.send_signal(signal.SIGINT)
        out, _ = serving.communicate(timeout=30)
        assert serving.returncode == 0
        assert "Traceback" not in out and "http://" not in out
    finally:
        serving.kill()
        serving.wait()


def test_a_run_that_is_killed_is_said_to_be_killed(run: Endless) -> None:
    watching = start(*WATCH, run.folder, "--wait", "0")
    assert watching.stdout is not None
    for line in watching.stdout:
        if line.startswith("step "):
            break
    run.process.kill()
    run.process.wait()
    rest = watching.stdout.read()
    assert watching.wait(timeout=60) == 1
    assert re.search(r"^The run was killed after step \d+; last heard", rest, re.MULTILINE)
    done = run_command([*WATCH, run.folder, "--once"])
    assert done.stdout.startswith("endless: The run was killed after step ")
