"""`anytrain verify-resume` on whole commands; what it finds out is tested in tests/insight."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launching import run_command

ANYTRAIN = [sys.executable, "-m", "anytrain", "verify-resume"]
SUM = """
import sys, time
from pathlib import Path
import torch
from anytrain.engine.checkpoint import Snapshot, Store

store = Store("runs/mine/checkpoints")
newest = store.newest_whole()
step, total = 0, torch.zeros(3)
if newest.path is not None and sys.argv[1] == "loads":
    step, total = newest.manifest.step, store.load(newest).part("total")
elif newest.path is not None:
    step = newest.manifest.step
while step < 8:
    step += 1
    total = total + step
    time.sleep(0.03)
    store.save(f"step-{step}", Snapshot(step=step, parts={"total": total}))
"""
TRAIN = """
import sys
import torch
from anytrain import Accelerator, ProjectConfiguration, set_seed

set_seed(1)
accelerator = Accelerator(
    cpu=True,
    project_dir=sys.argv[1],
    project_config=ProjectConfiguration(automatic_checkpoint_naming=True),
)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(40, 4))
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
while loader.iteration < 2:
    for step, (batch,) in enumerate(loader):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            accelerator.save_state()
accelerator.save_state()
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    (folder / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    (folder / "runs" / "mine" / "notes").write_text("mine")
    (folder / "sum.py").write_text(SUM)
    (folder / "train.py").write_text(TRAIN)
    return folder


def verify(here: Path, *words: object, **more: object) -> subprocess.CompletedProcess[str]:
    work = ["--work-dir", here.parent / "work"]
    return run_command([*ANYTRAIN, *work, *words], cwd=here, **more)


def test_a_script_that_resumes_exits_with_0_and_leaves_nothing(here: Path) -> None:
    told = verify(here, "--kills", 1, "--project-dir", "runs/mine", "sum.py", "loads")
    assert told.stdout == "resumed equals uninterrupted: 1 kill, 1 tensors identical\n"
    assert "kill 1 of 1" in told.stderr
    assert list((here.parent / "work").iterdir()) == []
    # Nor has it touched what was there.
    assert sorted(p.name for p in (here / "runs" / "mine").iterdir()) == ["checkpoints", "notes"]
    assert list((here / "runs" / "mine" / "checkpoints").iterdir()) == []


def test_a_script_that_forgets_exits_with_1_and_says_where_to_look(here: Path) -> None:
    words = ["--kills", 1, "--seed", 3, "--project-dir", "runs/mine", "sum.py", "forgets"]
    told = verify(here, *words, check=False)
    assert told.returncode == 1
    assert "first: total differs in 3 of 3 values; first at [0]: 36.0 and " in told.stdout
    (kept,) = (here.parent / "work").iterdir()
    assert f"look: both runs are in {kept}" in told.stdout
    assert (kept / "uninterrupted").is_dir() and (kept / "resumed").is_dir()


def test_nothing_runs_before_the_project_folder_is_known(here: Path) -> None:
    told = verify(here, "sum.py", "loads", check=False)
    assert told.returncode == 2
    assert "Cannot tell where sum.py keeps its checkpoints." in told.stderr
    assert "train.py --output_dir {project}" in told.stderr
    assert not (here.parent / "work").exists()


def test_asking_for_help_says_what_the_script_has_to_do() -> None:
    told = run_command([*ANYTRAIN, "--help"], env={"COLUMNS": "100"}).stdout
    for word in ("{project}", "--project-dir", "--kills", "--num_processes", "save_state()"):
        assert word in told


@pytest.mark.full
def test_two_processes_are_killed_and_resumed_too(here: Path) -> None:
    words = ["--kills", 3, "--num_processes", 2, "--cpu", "train.py", "{project}"]
    told = verify(here, *words, timeout=250)
    found = re.match(r"resumed equals uninterrupted: (\d) kills?, ", told.stdout)
    assert found is not None, told.stdout
    late = told.stderr.count("it does not count")  # what a busy machine delays behind the last save
    assert int(found[1]) + late == 3 and late < 2, told.stderr
