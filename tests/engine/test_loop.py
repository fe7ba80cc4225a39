from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest
import torch

from anytrain.core.events import EventKind, Request
from anytrain.engine.loop import (
    EvaluationLoop,
    Feed,
    Predictions,
    Progress,
    Requests,
    evaluate,
    fit,
)
from anytrain.engine.metrics import Collected
from anytrain.engine.recording.meter import Meter
from anytrain.engine.step.step import StepOutput
from anytrain.machine.parallel.world import Solo


class Batches:
    """Epochs of so many numbered batches, that remember where to begin."""

    num_unrepeated = 0

    def __init__(self, count: int, done: int = 0) -> None:
        self.count, self.done = count, done
        self.end_of_dataloader = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def walk_from(self, skip: int | None) -> Generator[Any]:
        done, self.done = self.done, 0
        for number in range(done, self.count):
            self.end_of_dataloader = number == self.count - 1
            yield (self.epoch, number)


class Diary:
    """A job that takes down what happens, and asks for things at given moments."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.told: list[str] = []
        self.ended: list[str] = []
        self.asks: dict[tuple[str, int], set[Request]] = defaultdict(set)
        self.after: dict[str, Requests] = {}

    def tell(self, kind: EventKind) -> Requests:
        self.told.append(f"{kind} {self.progress.step}")
        return frozenset(self.asks[kind, self.progress.step])

    def log(self) -> None:
        self.told.append("log")

    def settle(self) -> None:
        pass

    def evaluate(self) -> Requests:
        self.told.append("evaluate")
        return self.after.get("evaluate", frozenset())

    def save(self) -> Requests:
        self.told.append("save")
        return self.after.get("save", frozenset())

    def between(self) -> None:
        self.ended.append(f"epoch {self.progress.epoch}")


def run(
    count: int,
    progress: Progress,
    *,
    done: int = 0,
    micro: int = 1,
    asks: dict[tuple[str, int], set[Request]] | None = None,
    after: dict[str, Requests] | None = None,
) -> tuple[list[str], list[Any]]:
    diary, seen = Diary(progress), []
    diary.asks.update(asks or {})
    diary.after.update(after or {})

    def step(batch: Any) -> StepOutput:
        seen.append(batch.micro)
        return StepOutput(torch.ones(()), None, 0.1, torch.zeros(()))

    feed = Feed(Batches(count, done), micro, lambda batches: None)
    fit(diary, feed, step, Meter(torch.device("cpu")), progress)
    return diary.told, seen


def test_epochs_and_steps_are_told_in_order() -> None:
    told, seen = run(2, Progress(max_steps=4, num_epochs=2, batches_per_epoch=2))
    assert told == [
        "epoch_begin 0",
        "step_begin 0",
        "step_end 1",
        "step_begin 1",
        "step_end 2",
        "epoch_end 2",
        "epoch_begin 2",
        "step_begin 2",
        "step_end 3",
        "step_begin 3",
        "step_end 4",
        "epoch_end 4",
    ]
    assert seen == [((0, 0),), ((0, 1),), ((1, 0),), ((1, 1),)]


def test_the_last_step_ends_the_run_in_mid_epoch() -> None:
    progress = Progress(max_steps=3, num_epochs=2, batches_per_epoch=2)
    told, seen = run(2, progress)
    assert len(seen) == 3
    assert told[-1] == "epoch_end 3"
    assert (progress.step, progress.epoch, progress.batch, progress.epochs) == (3, 1, 1, 1.5)


def test_what_is_asked_for_is_done_in_one_order() -> None:
    told, _ = run(1, Progress(1, 1, 1), asks={("step_end", 1): {"save", "evaluate", "log"}})
    # An evaluation says what is asked for afterwards: a callback may have taken the save back.
    assert told == ["epoch_begin 0", "step_begin 0", "step_end 1", "log", "evaluate", "epoch_end 1"]
    told, _ = run(
        1,
        Progress(1, 1, 1),
        asks={("epoch_end", 1): {"evaluate"}},
        after={"evaluate": frozenset({"save"})},
    )
    assert told[-3:] == ["epoch_end 1", "evaluate", "save"]


@pytest.mark.parametrize("moment", ["step_end", "evaluate", "save"])
def test_a_stop_that_is_asked_for_at_any_moment_ends_the_run(moment: str) -> None:
    asks: dict[tuple[str, int], set[Request]] = {("step_end", 1): {"evaluate", "save"}}
    after: dict[str, Requests] = {"evaluate": frozenset({"save"})}
    if moment == "step_end":
        asks["step_end", 1] = {"stop"}
    else:
        after[moment] = frozenset({"stop"})
    told, seen = run(5, Progress(10, 2, 5), asks=asks, after=after)
    assert len(seen) == 1
    assert told[-1] == "epoch_end 1"


def test_an_epoch_that_is_stopped_is_followed_by_the_next() -> None:
    progress = Progress(max_steps=10, num_epochs=2, batches_per_epoch=3)
    _, seen = run(3, progress, asks={("step_end", 1): {"stop_epoch"}})
    assert seen == [((0, 0),), ((1, 0),), ((1, 1),), ((1, 2),)]
    assert (progress.epoch, progress.batch) == (2, 0)


def test_a_resumed_epoch_is_told_and_goes_on_where_it_was() -> None:
    progress = Progress(max_steps=6, num_epochs=2, batches_per_epoch=3, step=2, batch=2)
    told, seen = run(3, progress, done=2)
    assert told[:3] == ["epoch_begin 2", "step_begin 2", "step_end 3"]
    assert seen[:2] == [((0, 2),), ((1, 0),)]
    assert progress.step == 6


def test_a_finished_run_trains_no_more() -> None:
    progress = Progress(max_steps=3, num_epochs=1, batches_per_epoch=3, step=3, epoch=1)
    assert run(3, progress) == ([], [])


def test_an_empty_epoch_ends_the_run() -> None:
    progress = Progress(max_steps=10, num_epochs=1000, batches_per_epoch=10)
    told, seen = run(0, progress)
    assert seen == []
    assert told == ["epoch_begin 0", "epoch_end 0"]


def test_accumulated_batches_count_towards_the_epoch() -> None:
    progress = Progress(max_steps=2, num_epochs=1, batches_per_epoch=5)
    _, seen = run(5, progress, micro=3, asks={("step_end", 1): {"stop"}})
    assert len(seen) == 1
    assert progress.epochs == pytest.approx(0.6)


class Rows:
    """Batches of a data set, the last one filled up with repeats."""

    def __init__(self, batches: list[torch.Tensor], remainder: int) -> None:
        self.batches, self.num_unrepeated = batches, remainder
        self.end_of_dataloader = False

    def __iter__(self) -> Generator[Any]:
        for number, batch in enumerate(self.batches):
            self.end_of_dataloader = number == len(self.batches) - 1
            yield {"x": batch}


def test_an_evaluation_counts_every_row_once_and_keeps_what_it_is_told_to() -> None:
    seen: list[tuple[int, bool]] = []

    def predict(batch: Any) -> tuple[Any, Any, Any, Any]:
        return batch["x"].mean(), batch["x"] * 2, batch["x"], None

    def batch_done(losses: Any, logits: Any, labels: Any, inputs: Any, is_last: bool) -> None:
        seen.append((len(logits), is_last))

    loader = Rows([torch.arange(4.0), torch.tensor([4.0, 5.0, 0.0, 1.0])], remainder=2)
    keep = Predictions(logits=Collected())
    found = evaluate(EvaluationLoop(loader, Solo(), predict, batch_done, keep))
    assert seen == [(4, False), (2, True)]
    assert found.num_rows == 6
    assert found.loss.value(Solo()) == pytest.approx((0 + 1 + 2 + 3 + 4 + 5) / 6)
    assert found.logits is not None
    assert found.logits.result().tolist() == [0, 2, 4, 6, 8, 10]
    assert found.labels is None
