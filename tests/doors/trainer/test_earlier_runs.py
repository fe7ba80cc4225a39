"""A run that begins where another has saved neither counts, removes nor resumes its checkpoints."""

from __future__ import annotations

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
from equivalence import twins
from launching import launch
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
