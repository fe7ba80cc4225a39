"""Where a Trainer's time goes is on record, and what slows it down is found there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from anytrain.core import clock, records
from anytrain.doors.trainer import Trainer, recorder
from anytrain.insight.report import why
from anytrain.insight.report.why import judge, shares
from equivalence import twins


class Slow(Dataset[Any]):
    """Points that take their time to load."""

    def __init__(self, seconds: float) -> None:
        self.rows, self.seconds = twins.points(32), seconds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.rows[index]


class SlowToSave(Trainer):
    """A Trainer whose disk is slow."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.2)
        super()._save_checkpoint(*args, **kwargs)


SLOW: dict[str, dict[str, Any]] = {
    "data": {"train_dataset": Slow(0.005)},
    "save": {"kind": lambda made: SlowToSave, "save_strategy": "steps", "save_steps": 4},
    "evaluate": {"eval_dataset": Slow(0.005), "eval_strategy": "steps", "eval_steps": 4},
}


def build(tmp_path: Path, **given: Any) -> Any:
    given = {"model": twins.regression(), "train_dataset": twins.points(32), **given}
    given = {"num_train_epochs": 2, "save_strategy": "no", **given}
    return twins.build(twins.OURS, tmp_path, **given)


@pytest.mark.parametrize("slow", SLOW)
def test_what_slows_a_training_down_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    monkeypatch.setattr(why, "_WORTH_S", 0.0)  # of a run that takes half a second
    monkeypatch.setattr(clock, "_runs", [None])  # not the first: the process's age is no part of it
    trainer = build(tmp_path, **SLOW[slow])
    num_steps = trainer.train().global_step
    (life,) = records.read(tmp_path)
    assert (life.state, life.num_steps) == ("finished", num_steps)
    finding = judge(life)
    assert finding is not None
    assert finding.name == slow
    assert sum(shares(life).values()) == pytest.approx(1)
    assert life.choice("device")[0] == "cpu"


def test_evaluations_after_a_training_are_part_of_it_and_idle_time_is_not(tmp_path: Path) -> None:
    trainer = build(tmp_path, eval_dataset=Slow(0.002))
    trainer.train()
    (before,) = records.read(tmp_path)
    began = time.perf_counter()
    time.sleep(3.0)
    idle = time.perf_counter() - began
    trainer.evaluate()
    busy = time.perf_counter() - began - idle
    (after,) = records.read(tmp_path)
    assert after.state == "finished"
    assert after.seconds["evaluate"] >= 32 * 0.002
    grown = sum(after.seconds.values()) - sum(before.seconds.values())
    assert after.seconds["evaluate"] <= grown + 1e-3
    assert grown < busy + idle / 2


def test_each_training_and_each_resume_is_a_life(tmp_path: Path) -> None:
    build(tmp_path, save_strategy="epoch", num_train_epochs=1).train()
    resumed = build(tmp_path, save_strategy="epoch")
    last = resumed.train(resume_from_checkpoint=True).global_step
    first, second = records.read(tmp_path)
    assert second.began["step"] == first.last["step"] > 0
    assert second.last["step"] == last
    assert second.num_steps == last - first.num_steps


def test_a_run_says_what_its_model_takes_of_each_ranks_memory(tmp_path: Path) -> None:
    build(tmp_path).train()
    (life,) = records.read(tmp_path)
    told = life.choice("strategy")
    assert told[0] == "solo"
    assert "one process; weights, gradients and optimizer take " in told[1]
    assert told[1].endswith(" on each rank")


def test_a_training_that_fails_says_so(tmp_path: Path) -> None:
    class Failing(Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        build(tmp_path, train_dataset=Failing()).train()
    (life,) = records.read(tmp_path)
    assert (life.state, life.num_steps) == ("failed", 0)


def test_a_remark_is_made_of_a_run_that_was_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path, disable_tqdm=False, **SLOW["data"]).train()
    assert "time went to" not in capsys.readouterr().out
    monkeypatch.setattr(recorder, "_WORTH_A_REMARK_S", 0.0)
    monkeypatch.setattr(why, "_WORTH_S", 0.0)
    build(tmp_path, disable_tqdm=False, **SLOW["data"]).train()
    told = capsys.readouterr().out
    assert "time went to" in told
    assert "waiting for the next batch" in told
