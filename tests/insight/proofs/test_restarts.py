from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import psutil
import pytest

from anytrain.core.errors import BadInput
from anytrain.engine.checkpoint.manifest import Manifest
from anytrain.insight.proofs.restarts import (
    Commit,
    OneStart,
    RestartedRun,
    TrainingScript,
    mirror,
    plan,
)

SAVES = """
import sys, time, torch
from pathlib import Path
from anytrain.engine.checkpoint import Snapshot, Store

store = Store(Path(sys.argv[1], "checkpoints"))
for step in (1, 2):
    store.save(f"step-{step}", Snapshot(step=step, models=[{"weight": torch.zeros(1)}], parts={}))
    Path(sys.argv[1], f"saved-{step}").touch()
time.sleep(1000)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script and some data."""
    working = tmp_path / "working"
    (working / "data").mkdir(parents=True)
    (working / "runs" / "mine").mkdir(parents=True)
    (working / "runs" / "mine" / "precious").write_text("old")
    (working / "runs" / "other").write_text("data")
    (working / "train.py").write_text("")
    monkeypatch.chdir(working)
    return working


def test_a_folder_of_links_leaves_the_project_out(here: Path, tmp_path: Path) -> None:
    target = tmp_path / "links"
    mirror(here, target, Path("runs/mine"))
    assert sorted(p.name for p in target.iterdir()) == ["data", "runs", "train.py"]
    assert (target / "train.py").is_symlink() and not (target / "runs").is_symlink()
    assert [p.name for p in (target / "runs").iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (TrainingScript("none.py"), "no such file"),
        (TrainingScript("train.py"), "neither {project} is among its arguments"),
        (TrainingScript("train.py", ("{project}",), Path("runs")), "both"),
        (TrainingScript("train.py", (), Path("/tmp/runs")), "lies outside"),
        (TrainingScript("train.py", (), Path("../runs")), "lies outside"),
    ],
)
def test_a_project_folder_that_nobody_knows_is_refused(
    here: Path, script: TrainingScript, why: str
) -> None:
    with pytest.raises(BadInput) as refused:
        script.check()
    assert why in refused.value.why


def test_the_placeholder_is_replaced_wherever_it_stands() -> None:
    script = TrainingScript(
        "train.py", ("--out={project}/a", "--lr", "1"), num_processes=2, cpu=True
    )
    assert script.command(Path("/p")) == [
        *(sys.executable, "-m", "anytrain", "launch", "--num_processes", "2", "--cpu"),
        *("train.py", "--out=/p/a", "--lr", "1"),
    ]


def test_a_life_that_is_killed_leaves_no_process(here: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    (here / "train.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'],\n"
        "    start_new_session=True)\n"
        "print('waiting', flush=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n')\n"
        "time.sleep(1000)\n"
    )
    trial = RestartedRun(TrainingScript("train.py", ("{project}",)), tmp_path / "trial")
    assert trial.live(lambda life: pids.exists() and pids.read_text().endswith("\n")) is None
    until = time.monotonic() + 240  # the kernel takes its time on a busy machine
    for pid in map(int, pids.read_text().split()):
        while is_alive(pid):
            assert time.monotonic() < until
            time.sleep(0.05)
    assert trial.log.read_text() == "waiting\n"


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def commit(step: int, seconds: float) -> Commit:
    return Commit(f"step-{step}", Manifest(step, step, 1, {}), seconds)


@pytest.mark.parametrize("num_commits", [1, 2, 3, 10])
@pytest.mark.parametrize("num_kills", [1, 3, 12])
def test_kills_are_spread_over_the_saves(num_commits: int, num_kills: int) -> None:
    commits = [commit(3 * n, 2.0 + n) for n in range(1, num_commits + 1)]
    for seed in range(20):
        traps = plan(commits, num_kills, random.Random(seed))
        steps = [trap.after_step or 0 for trap in traps]
        assert len(traps) == num_kills
        assert steps == sorted(steps)
        assert all(step < commits[-1].manifest.step for step in steps), "there is work left"
        assert all(trap.start_s == 3.0 and trap.gap_s in (1.0, 3.0) for trap in traps)
        if num_commits > 2:
            assert steps[-1] >= 6
    again = plan(commits, num_kills, random.Random(0))
    assert again == plan(commits, num_kills, random.Random(0))


def test_a_checkpoint_that_came_just_before_the_kill_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SAVES)
    trial = RestartedRun(TrainingScript(str(script), ("{project}",)), tmp_path / "trial")

    def late(life: OneStart) -> bool:
        """Decide at the first checkpoint, and kill after the second."""
        while life.own_commits and not (trial.project / "saved-2").exists():
            time.sleep(0.01)
        return bool(life.own_commits)

    assert trial.live(late) is None
    assert trial.newest is not None and trial.newest.manifest.step == 2
