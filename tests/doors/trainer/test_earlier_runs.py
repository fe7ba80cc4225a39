"""A run that begins where another has saved neither counts, removes nor resumes its checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.core.errors import BadInput, CheckpointError, Notice
from anytrain.doors.callbacks import EarlyStoppingCallback
from anytrain.doors.trainer.outputs import get_last_checkpoint
from anytrain.engine.checkpoint import files
from equivalence import twins
from launching import launch, run_script
from slow_training import TRAINING

GIVEN: dict[str, Any] = {
    "model": twins.regression,
    "train_dataset": twins.points(22),
    "save_strategy": "steps",
    "save_steps": 4,
    "num_train_epochs": 2,
}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_an_earlier_runs_checkpoints_are_moved_aside(tmp_path: Path) -> None:
    first = twins.train(twins.OURS, tmp_path, **GIVEN)
    whole = first.folders
    with pytest.warns(Notice, match=r"held 3 checkpoints of an earlier run: moved to .*earlier-1"):
        twins.train(twins.OURS, tmp_path, **{**GIVEN, "num_train_epochs": 1, "save_total_limit": 1})
    assert names(tmp_path) == ["checkpoint-6"]
    assert names(tmp_path / "earlier-1") == whole
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    with pytest.warns(Notice, match="earlier-2"):
        twins.train(twins.OURS, tmp_path, **GIVEN)
    assert names(tmp_path / "earlier-2") == ["checkpoint-6"]
    again = twins.train(
        twins.OURS, tmp_path / "b", **GIVEN, resume=str(tmp_path / "earlier-1" / "checkpoint-4")
    )
    for name, weight in first.weights.items():
        assert torch.equal(again.weights[name], weight), name


def test_what_earlier_runs_left_is_told_with_its_size_and_capped_where_that_was_asked(
    tmp_path: Path,
) -> None:
    given = {**GIVEN, "num_train_epochs": 1, "save_steps": 6}
    for number in (1, 2, 3):
        twins.train(twins.OURS, tmp_path, **given)
        (tmp_path / "checkpoint-6").rename(tmp_path / "checkpoint-6x")
        files.make_folder(tmp_path / f"earlier-{number}")
        (tmp_path / "checkpoint-6x").rename(tmp_path / f"earlier-{number}" / "checkpoint-6")
    (tmp_path / "earlier-1" / "notes.md").write_text("mine")
    (tmp_path / "earlier-x").mkdir()
    twins.train(twins.OURS, tmp_path, **given)
    with pytest.warns(Notice, match=r"earlier-4 \(.* kB; earlier-1 to earlier-4 take .* kB\)"):
        twins.train(twins.OURS, tmp_path, **given)
    with pytest.warns(Notice, match=r"Removed 3 checkpoints of older runs"):
        twins.train(twins.OURS, tmp_path, **given, earlier_total_limit=2)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("earlier-*/*"))
    kept = [f"earlier-{number}/checkpoint-6" for number in (4, 5)]
    assert left == ["earlier-1/notes.md", *kept], "and what somebody else has put there"
    assert not (tmp_path / "earlier-2").exists()


def test_a_run_that_died_before_its_first_save_leaves_nothing_to_resume(tmp_path: Path) -> None:
    twins.train(twins.OURS, tmp_path, **GIVEN)
    with pytest.warns(Notice, match="moved to"):
        twins.train(twins.OURS, tmp_path, **{**GIVEN, "max_steps": 2, "save_strategy": "epoch"})
    # Its one save is of an epoch that was cut; take it away.
    for found in tmp_path.glob("checkpoint-*"):
        found.rename(tmp_path / "earlier-1" / f"cut-{found.name}")
    with pytest.raises(CheckpointError, match="No valid checkpoint found"):
        twins.train(twins.OURS, tmp_path, **GIVEN, resume=True)


def test_an_earlier_runs_checkpoints_are_removed_where_that_was_asked(tmp_path: Path) -> None:
    twins.train(twins.OURS, tmp_path, **GIVEN)
    (tmp_path / "checkpoint-notes").mkdir()
    twins.train(twins.OURS, tmp_path, **{**GIVEN, "num_train_epochs": 1}, overwrite_output_dir=True)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-notes"]
    assert not list(tmp_path.glob("earlier-*"))


def test_a_resumed_run_keeps_its_checkpoints_by_whatever_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    twins.train(twins.OURS, tmp_path / "link", **GIVEN)
    where = tmp_path / "real" / "checkpoint-4"
    twins.train(twins.OURS, tmp_path / "link", **GIVEN, resume=str(where))
    assert names(tmp_path / "real") == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]


def test_a_second_training_of_one_trainer_goes_over_its_own(tmp_path: Path) -> None:
    ran = twins.train(twins.OURS, tmp_path, **GIVEN)
    whole = ran.folders
    ran.trainer.train()
    assert names(tmp_path) == whole
    assert not list(tmp_path.glob("earlier-*"))


def test_a_run_that_saves_nothing_moves_nothing(tmp_path: Path) -> None:
    whole = twins.train(twins.OURS, tmp_path, **GIVEN).folders
    twins.train(twins.OURS, tmp_path, **{**GIVEN, "save_strategy": "no"})
    assert names(tmp_path) == whole


RANKS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import warnings
from equivalence import twins
for _ in range(2):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        twins.train(
            twins.OURS, Path(sys.argv[1]), model=twins.regression, train_dataset=twins.points(16),
            save_strategy="epoch", num_train_epochs=1,
        )
    moved = len([one for one in told if "moved to" in str(one.message)])
    sys.stdout.write(f"{moved}\\n")  # in one: ranks' lines mix
"""


@pytest.mark.full
def test_one_rank_moves_while_the_other_waits(tmp_path: Path) -> None:
    launch(RANKS, 2, tmp_path, Path(__file__).parents[2])
    assert names(tmp_path) == ["checkpoint-2"]
    assert names(tmp_path / "earlier-1") == ["checkpoint-2"]


def test_patience_goes_on_where_it_was_by_default(tmp_path: Path) -> None:
    given = {
        **GIVEN,
        "eval_dataset": twins.points(9),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "learning_rate": 0.0,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
    }
    once = twins.train(twins.OURS, tmp_path, **given, callbacks=[EarlyStoppingCallback(3)])
    assert once.output.global_step == 4
    where = str(tmp_path / "checkpoint-2")
    twice = twins.train(
        twins.OURS, tmp_path, **given, callbacks=[EarlyStoppingCallback(3)], resume=where
    )
    assert twice.output.global_step == 4
    longer = twins.train(
        twins.OURS, tmp_path, **given, callbacks=[EarlyStoppingCallback(5)], resume=where
    )
    assert longer.output.global_step == 7


def test_a_run_is_refused_where_another_process_trains(tmp_path: Path) -> None:
    live = subprocess.Popen([sys.executable, "-c", TRAINING, str(tmp_path), "100000"])
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "run.json").exists():
            assert live.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        with pytest.raises(BadInput, match=f"process {live.pid} trains there at this moment"):
            twins.train(twins.OURS, tmp_path, **GIVEN)
    finally:
        live.kill()
        live.wait()
    twins.train(twins.OURS, tmp_path, **GIVEN)
    assert names(tmp_path) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]


@pytest.mark.parametrize("where", ["the arguments", "the environment"])
def test_auto_goes_on_from_the_newest_where_there_is_one_and_else_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    given = {**GIVEN, "resume_from_checkpoint": "auto"}
    if where == "the environment":
        monkeypatch.setenv("ANYTRAIN_RESUME_FROM_CHECKPOINT", "auto")
        given = GIVEN
    once = twins.train(twins.OURS, tmp_path / "once", **given)
    assert once.output.global_step == 12
    cut = shutil.copytree(tmp_path / "once", tmp_path / "cut")
    shutil.rmtree(cut / "checkpoint-12")
    ran = twins.train(twins.OURS, cut, **given)
    assert names(cut) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]
    assert not list(cut.glob("earlier-*"))
    for name, weight in once.weights.items():
        assert torch.equal(ran.weights[name], weight), name
    assert next(step for what, step, _ in ran.events if what.endswith("step_end")) == 9
    ran.trainer.train()
    assert len(ran.trainer.state.log_history) == len(once.trainer.state.log_history), "anew"


def test_a_path_in_the_arguments_is_gone_on_from_and_true_wants_one(tmp_path: Path) -> None:
    whole = twins.train(twins.OURS, tmp_path, **GIVEN)
    where = str(tmp_path / "checkpoint-8")
    ran = twins.train(twins.OURS, tmp_path, **GIVEN, resume_from_checkpoint=where)
    assert ran.trainer.state.log_history[0]["step"] == whole.trainer.state.log_history[0]["step"]
    assert names(tmp_path) == whole.folders
    with pytest.raises(CheckpointError, match="No valid checkpoint"):
        twins.train(twins.OURS, tmp_path / "new", **GIVEN, resume_from_checkpoint=True)
    again = twins.build(
        twins.OURS, tmp_path, **{**GIVEN, "model": twins.regression()}, resume_from_checkpoint=True
    )
    with pytest.warns(Notice, match="moved to .*earlier-1"):
        again.train(resume_from_checkpoint=False)
    assert names(tmp_path / "earlier-1") == whole.folders, "False is no, whatever the arguments say"


TOGETHER = """
import json, os, signal, sys, time, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from anytrain.core.errors import BadInput
from anytrain.doors.callbacks import TrainerCallback
from equivalence import twins

base = Path(sys.argv[1])
warnings.simplefilter("ignore")

def wait_for(path):
    deadline = time.monotonic() + 240
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.002)

class Waits(TrainerCallback):
    def __init__(self, for_file):
        self.for_file = for_file
    def on_step_end(self, args, state, control, **known):
        if state.global_step == 3:  # one checkpoint is there, or comes
            (Path(args.output_dir) / f"trains-{os.getpid()}").write_text("")
            wait_for(self.for_file)

def train(folder, for_file, **given):
    twins.train(
        twins.OURS, folder, model=twins.regression, train_dataset=twins.points(16),
        save_strategy="steps", save_steps=2, num_train_epochs=1, callbacks=[Waits(for_file)],
        **given,
    )

def forked(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            sys.stdout.flush()
            os._exit(0)
    return child

said = {"rounds": []}
for number in range(3):
    folder, ready, refused = (base / f"{name}{number}" for name in ("run", "ready", "refused"))

    def work():
        wait_for(ready)
        try:
            train(folder, refused)
        except BadInput as error:
            refused.write_text(f"{os.getpid()} {error}")

    pids = [forked(work) for _ in range(2)]
    ready.write_text("")
    for pid in pids:
        os.waitpid(pid, 0)
    words = refused.read_text().split(" ", 1) if refused.exists() else ["0", ""]
    said["rounds"].append({
        "pids": pids, "refused": int(words[0]), "why": words[1],
        "saved": sorted(path.name for path in folder.glob("checkpoint-*")),
        "left": [path.name for path in folder.glob(".*")],
    })

folder = base / "live"
pid = forked(lambda: train(folder, base / "never", dataloader_num_workers=1))
wait_for(folder / f"trains-{pid}")
wait_for(folder / "checkpoint-2")
try:
    train(folder, base, resume=True)
except BadInput as error:
    said["live"] = [pid, str(error)]
os.kill(pid, signal.SIGKILL)  # its worker lives for some seconds more
os.waitpid(pid, 0)
train(folder, base, resume=True)
said["after"] = sorted(path.name for path in folder.glob("checkpoint-*"))
(base / "said.json").write_text(json.dumps(said))
"""


def test_of_two_runs_that_begin_together_one_has_the_folder_until_it_ends_or_dies(
    tmp_path: Path,
) -> None:
    run_script(TOGETHER, tmp_path, Path(__file__).parents[2])
    said = json.loads((tmp_path / "said.json").read_text())
    for found in said["rounds"]:
        assert found["refused"] in found["pids"], found
        (other,) = set(found["pids"]) - {found["refused"]}
        assert f"process {other} trains there at this moment" in found["why"]
        assert found["saved"] == ["checkpoint-2", "checkpoint-4"]
        assert found["left"] == []
    pid, why = said["live"]
    assert f"process {pid} trains there at this moment" in why, "and not that a file is missing"
    assert said["after"] == ["checkpoint-2", "checkpoint-4"]


APART = """
import os, sys, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from equivalence import twins
from anytrain.core.errors import CheckpointError
warnings.simplefilter("ignore")
rank = os.environ["RANK"]
base = Path(sys.argv[1])
given = {"model": twins.regression, "train_dataset": twins.points(16), "num_train_epochs": 1}
try:
    twins.train(
        twins.OURS, base / rank, **given, save_strategy="steps", save_steps=1,
    )
except CheckpointError as error:
    (base / f"said-{rank}").write_text(str(error))
ran = twins.train(twins.OURS, base / rank, **given, save_strategy="no")
trainer = ran.trainer
trainer._save_checkpoint(trainer.model, None, wait=True)  # as on a signal: told, and no abort
(base / f"done-{rank}").write_text(str(ran.output.global_step))
"""


def test_ranks_that_do_not_share_the_folder_are_told_before_they_train(tmp_path: Path) -> None:
    launch(APART, 2, tmp_path, Path(__file__).parents[2])
    for rank in (0, 1):
        said = (tmp_path / f"said-{rank}").read_text()
        assert said.startswith("Cannot begin a run in ")
        assert f"rank 1 does not see what rank 0 writes to {tmp_path / '0'}: it has its own" in said
        assert "save to a filesystem that all machines share" in said
        assert (tmp_path / f"done-{rank}").read_text() == "2"
        assert not list((tmp_path / str(rank)).glob("checkpoint-*"))
