"""Signals that reach `anytrain launch`: what the ranks get of them, and what is said."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

import launching

WARNED = {"ANYTRAIN_STOP_SIGNALS": "SIGTERM,SIGINT,SIGUSR1"}
# Every rank waits for the others, and the last to come signals their launcher.
TOGETHER = """
import os, signal, sys, time
from pathlib import Path
rank, folder = os.environ.get("RANK", "0"), Path(sys.argv[1])
number, size = int(sys.argv[2]), int(os.environ.get("WORLD_SIZE", "1"))

def together():
    (folder / f"here-{rank}").touch()
    while len(list(folder.glob("here-*"))) < size:
        time.sleep(0.01)
    if rank == "0":
        os.kill(os.getppid(), number)
"""
SAVES = f"""{TOGETHER}
def save(asked, frame):
    (folder / f"saved-{{rank}}").write_text(str(asked))
    sys.exit(128 + asked)

signal.signal(int(sys.argv[3]), save)
together()
time.sleep(1000)
"""
LOADS = f"{TOGETHER}together()\ntime.sleep(1000)"
HANGS_UP = f"""{TOGETHER}
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
os.kill(os.getpid(), signal.SIGHUP)
together()
print("done", flush=True)
"""
TRAINS = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader
from anytrain import Accelerator

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(4000, 4), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
try:
    for number, batch in enumerate(loader):
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 3 and "HANGS_UP" not in os.environ:
            os.kill(os.getpid(), signal.SIGUSR1)
        elif number == 3:
            master, slave = os.openpty()
            os.close(master)
            os.dup2(slave, 1)
            os.kill(os.getpid(), signal.SIGHUP)
            print("to a terminal that is gone", flush=True)
except SystemExit as leaving:
    print(leaving.code)
    with open(sys.argv[1] + "/codes", "a") as codes:
        codes.write(f"{leaving.code} ")
"""
SAVED = """
import os, signal, sys, time
from anytrain.machine.processes import notes, heartbeat
heartbeat.Pulse(0, os.environ["ANYTRAIN_BEATS"]).mark(3, "between steps")

def save(asked, frame):
    notes.leave(os.environ["ANYTRAIN_BEATS"], 0, "preempted", "saved")
    time.sleep(0.6)  # a second request within half a second is part of the first
    os.kill(os.getppid(), asked)
    time.sleep(1000)

signal.signal(signal.SIGTERM, save)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(1000)
"""


def launch(
    folder: Path, text: str, num_processes: int, *args: object, **how: object
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    words = ["launch", "--cpu", "-n", num_processes, script, folder, *args]
    how["env"] = {"TMPDIR": str(folder), **how.get("env", {})}  # type: ignore[dict-item]
    ran = launching.run_anytrain(*words, check=False, **how)  # type: ignore[arg-type]
    assert not list(folder.glob("anytrain-*")), "the launcher's folder must go with it"
    return ran


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(
    ("to_launcher", "to_ranks"),
    [(signal.SIGUSR1, signal.SIGUSR1), (signal.SIGHUP, signal.SIGTERM)],
)
def test_the_ranks_are_asked_in_words_that_they_save_for(
    tmp_path: Path, num_processes: int, to_launcher: int, to_ranks: int
) -> None:
    ran = launch(tmp_path, SAVES, num_processes, to_launcher.real, to_ranks.real, env=WARNED)
    assert ran.returncode == 128 + to_launcher
    saved = [(tmp_path / f"saved-{rank}").read_text() for rank in range(num_processes)]
    assert saved == [str(int(to_ranks))] * num_processes


def test_a_warning_to_all_ranks_saves_and_is_told_once(tmp_path: Path) -> None:
    ran = launching.launch(TRAINS, 2, tmp_path, env=WARNED)
    assert ran.stdout.split() == [str(128 + signal.SIGUSR1)] * 2
    asked, saved = ran.stderr.splitlines()
    assert asked == "anytrain: asked to stop by SIGUSR1: saving after this step, then stopping."
    assert saved.startswith("anytrain: saved ")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_terminal_that_closes_saves_the_run_whatever_is_printed(
    tmp_path: Path, num_processes: int
) -> None:
    launching.launch(TRAINS, num_processes, tmp_path, env={"HANGS_UP": "1"})
    codes = (tmp_path / "codes").read_text().split()
    assert codes == [str(128 + signal.SIGHUP)] * num_processes
    assert '"kind": "checkpoint"' in (tmp_path / "events.jsonl").read_text()


def test_a_launcher_whose_terminal_is_gone_ends_with_the_signals_code(tmp_path: Path) -> None:
    gone = "import os\nmaster, slave = os.openpty()\nos.close(master)\nos.dup2(slave, 2)"
    ran = launch(tmp_path, LOADS, 1, signal.SIGHUP.real, before=gone)
    assert ran.returncode == 128 + signal.SIGHUP


@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_is_ignored_stays_ignored(tmp_path: Path, num_processes: int) -> None:
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"  # as nohup does
    ran = launch(tmp_path, HANGS_UP, num_processes, signal.SIGHUP.real, before=ignored)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "done\n" * num_processes


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_interrupt_while_scripts_import_is_one_line(tmp_path: Path, num_processes: int) -> None:
    ran = launch(tmp_path, LOADS, num_processes, signal.SIGINT.real)
    assert ran.returncode == 130
    assert ran.stderr == "anytrain: Stopped by Ctrl-C (SIGINT). No step was begun.\n"


def test_what_was_saved_is_not_said_to_be_lost(tmp_path: Path) -> None:
    ran = launch(tmp_path, SAVED, 1)
    assert ran.returncode == 143
    said = "anytrain: Stopped by SIGTERM. The script was at step 3 (between steps).\n"
    assert ran.stderr == said


def test_an_interrupt_before_anything_was_started_is_one_line(tmp_path: Path) -> None:
    interrupt = """
import os
from anytrain.doors.launch import target
target.choose_target = lambda *given: os.kill(os.getpid(), signal.SIGINT)
"""
    ran = launch(tmp_path, "", 2, before=interrupt)
    assert ran.returncode == 130
    said = "anytrain: Stopped by Ctrl-C (SIGINT) before a process was started.\n"
    assert ran.stderr == said
