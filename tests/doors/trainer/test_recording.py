"""What is written down: the history, the journal and the trackers, in training and out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.core import records
from anytrain.core.errors import Notice
from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.trainer import Trainer, recorder
from equivalence import twins


def build(tmp_path: Path, **given: Any) -> Any:
    given = {"model": twins.regression(), "train_dataset": twins.points(8), **given}
    given = {"eval_dataset": twins.points(4), "num_train_epochs": 1, **given}
    return twins.build(twins.OURS, tmp_path, **given)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def logged(folder: Path) -> list[dict[str, Any]]:
    return records.open_run(folder).metrics


def tracked(tmp_path: Path) -> list[dict[str, Any]]:
    return lines(next((tmp_path / "runs").rglob("metrics.jsonl")))


def test_an_evaluation_alone_is_written_down(tmp_path: Path) -> None:
    trainer = build(tmp_path, report_to="jsonl")
    found = trainer.evaluate()
    assert [line["eval_loss"] for line in logged(tmp_path)] == [found["eval_loss"]]
    assert [line["eval/loss"] for line in tracked(tmp_path)] == [found["eval_loss"]]


def test_evaluations_before_and_after_training_belong_to_its_run(tmp_path: Path) -> None:
    trainer = build(tmp_path, report_to="jsonl")
    before = trainer.evaluate()["eval_loss"]
    trackers = trainer._trackers
    num_steps = trainer.train().global_step
    after = trainer.evaluate()["eval_loss"]
    assert trainer._trackers is trackers
    for found, name, step in (
        (logged(tmp_path), "eval_loss", "step"),
        (tracked(tmp_path), "eval/loss", "_step"),
    ):
        told = [(line[step], line[name]) for line in found if name in line]
        assert told == [(0, before), (num_steps, after)]


def test_a_later_process_that_evaluates_leaves_the_history_as_it_is(tmp_path: Path) -> None:
    build(tmp_path).train()
    before, size = logged(tmp_path), (tmp_path / "metrics.jsonl").stat().st_size
    build(tmp_path).evaluate()
    assert logged(tmp_path) == before
    assert (tmp_path / "metrics.jsonl").stat().st_size > size, "it is written down aside"


def test_the_next_training_ends_the_trackers_that_were_left_open(tmp_path: Path) -> None:
    first = build(tmp_path / "a", report_to="jsonl")
    first.train()
    assert first._trackers.is_running
    second = build(tmp_path / "b", report_to="jsonl")
    second.train()
    assert not first._trackers.is_running
    first.evaluate()  # begins again
    assert "eval/loss" in tracked(tmp_path / "a")[-1]
    second.end()
    assert second._trackers is None
    recorder._finish_left_open()  # what the interpreter does at its end
    assert not first._trackers.is_running


def test_what_cannot_be_saved_is_kept_out_of_the_history_alone(tmp_path: Path) -> None:
    class Thing:
        pass

    seen: list[Any] = []

    class Looks(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seen.append(more["logs"].get("thing"))

    class Logs(Trainer):
        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            logs |= {"thing": Thing(), "norm": torch.tensor(2.0), "sizes": torch.arange(2)}
            super().log(logs, start_time)

    trainer = build(
        tmp_path,
        kind=lambda base: Logs,
        callbacks=[Looks()],
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    with pytest.warns(Notice, match="'thing' is not kept in the history of the run: a Thing"):
        trainer.train()
    entry = trainer.state.log_history[0]
    assert "thing" not in entry
    assert (entry["norm"], entry["sizes"]) == (2.0, [0, 1])
    assert all(isinstance(thing, Thing) for thing in seen)
    assert (tmp_path / "checkpoint-1" / "manifest.json").exists()
