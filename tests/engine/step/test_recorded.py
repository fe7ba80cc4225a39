"""The rules of recording, with a recorder that runs its work again at each replay.

What only a real graph shows is in tests/gpu/test_recorded_on_cuda.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.engine.step import recorded
from anytrain.engine.step.cuda_graph import Draws
from anytrain.engine.step.recorded import Recordings
from anytrain.engine.step.returns import Returns, unlimited
from anytrain.engine.step.shortcuts import Shortening


class Again:
    """Replay by running the work once more."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0
        self.fails: Exception | None = None
        self.marks: list[int] = []
        self.draws: list[Draws | None] = []

    @contextmanager
    def watching(self) -> Iterator[Draws]:
        yield Draws(self.marks, 9)

    def record(self, work: Any, draws: Draws | None) -> Any:
        if self.fails is not None:
            raise self.fails
        self.num_recorded += 1
        self.draws.append(draws)
        output = torch.zeros(())

        def replay() -> None:
            self.num_replayed += 1
            output.copy_(work())

        return replay, output

    def release(self) -> None:
        pass

    renew = release

    def is_current(self) -> bool:
        return True


class Plain(Shortening):
    """No shortcuts: told when it may begin, and counting what was undone."""

    def __init__(self) -> None:
        super().__init__(None, ())
        self.ready, self.num_undone = True, 0

    def is_ready(self) -> bool:
        return self.ready

    def undo(self, because: str) -> bool:
        self.num_undone += 1
        return super().undo(because)


class Bench:
    is_whole = True

    def __init__(self, model: nn.Module | None = None, returns: Returns | None = None) -> None:
        self.model = model or nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.recorder, self.told, self.shortening = Again(), [], Plain()
        self.recordings = Recordings(
            self.recorder,
            self.model,
            (self.optimizer,),
            lambda value, because: self.told.append((value, because)),
            returns=returns,
        )

    def compute(self, tree: Any) -> torch.Tensor:
        return self.model(tree["x"]).sum().detach()

    def __call__(self, rows: int, **more: Any) -> torch.Tensor:
        tree = {"x": torch.rand(rows, 2, device="cpu"), **more}
        found = self.recordings.find(self, tree, "step", ())
        if found is None:
            with self.recordings.observed(self):
                return self.compute(tree)
        recording, tensors = found
        result = recording(tensors)
        assert torch.equal(result, self.compute(tree))
        return result


@pytest.fixture(autouse=True)
def _host_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_is_elsewhere", lambda tensor: False)


def test_the_first_steps_run_op_by_op_and_later_ones_are_replayed():
    bench = Bench()
    for _ in range(5):
        bench(4)
    assert (bench.recorder.num_recorded, bench.recorder.num_replayed) == (1, 3)
    assert bench.told == [("cuda_graph", "a step is recorded once for each shape and replayed")]


def test_nothing_is_recorded_before_the_step_is_ready():
    bench = Bench()
    bench.shortening.ready = False
    for _ in range(5):
        bench(4)
    assert bench.recorder.num_recorded == 0
    bench.shortening.ready = True
    bench(4)
    assert bench.recorder.num_recorded == 1


def test_code_that_changed_runs_op_by_op_before_it_is_recorded_again():
    bench = Bench()
    for _ in range(4):
        bench(4)
    bench.recordings.forget(code_changed=True)
    replayed = bench.recorder.num_replayed
    bench(4)
    assert bench.recorder.num_replayed == replayed
    bench(4)
    assert bench.recorder.num_recorded == 2


def test_what_was_given_up_can_be_tried_again():
    bench = Bench()
    bench.recorder.fails = RuntimeError("no")
    for _ in range(5):
        bench(4)
    assert bench.recordings.stopped is not None
    bench.recorder.fails = None
    bench.recordings.try_again()
    bench(4)
    bench(4)
    assert bench.recorder.num_recorded == 1


def test_each_shape_has_its_own_recording_up_to_a_bound():
    bench = Bench(returns=Returns(unlimited))
    for rows in [1, 1, *range(1, 12), *range(1, 12)]:
        bench(rows)
    assert bench.recorder.num_recorded == recorded.MOST_SHAPES
    assert "length_buckets" in bench.told[-1][1]


def test_a_shape_that_may_never_come_again_is_not_recorded_at_first_sight():
    bench = Bench()
    for rows in (1, 1, 1, 2, 3, 4, 5, 6, 7):
        bench(rows)
    assert bench.recorder.num_recorded == 1
    bench(7)
    bench(7)
    assert bench.recorder.num_recorded == 2


def test_a_shape_that_is_known_to_come_again_is():
    bench = Bench(returns=Returns(are_few=lambda: True))
    for rows in (1, 1, 2, 3):
        bench(rows)
    assert bench.recorder.num_recorded == 2


@pytest.mark.parametrize(("num_steps", "num_recorded"), [(20, 0), (600, recorded.MOST_SHAPES)])
def test_shapes_are_recorded_where_the_rest_of_the_run_repays_it(num_steps, num_recorded):
    left = list(range(num_steps, 0, -1))
    bench = Bench(returns=Returns(lambda: left[0]))
    while left:
        bench(len(left) % 12 + 1)
        left.pop(0)
    assert bench.recorder.num_recorded == num_recorded
    assert ("repay" in bench.told[-1][1]) is (num_recorded == 0)


def test_a_short_run_records_no_more_of_its_buckets_than_it_repays():
    left = list(range(20, 0, -1))
    bench = Bench(returns=Returns(lambda: left[0], lambda: True))
    while left:
        bench(len(left) % 5 + 1)
        left.pop(0)
    assert bench.recorder.num_recorded == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda bench: bench.model.eval(),
        lambda bench: bench.model[0].weight.requires_grad_(False),
        lambda bench: setattr(bench.model[0].weight, "data", bench.model[0].weight.data.clone()),
        lambda bench: bench.optimizer.param_groups[0].update(lr=0.5),
        lambda bench: setattr(bench.model[1], "p", 0.5),
        lambda bench: bench.optimizer.load_state_dict(bench.optimizer.state_dict()),
    ],
    ids=["mode", "frozen", "storage", "rate", "dropout", "loaded"],
)
def test_what_a_recording_was_made_with_makes_a_new_one_when_it_changes(change):
    bench = Bench()
    for _ in range(4):
        bench(4)
    change(bench)
    if bench.model[1].p:
        bench.model.eval()
    bench(4)  # op by op: what it draws now is not known before
    bench(4)
    assert bench.recorder.num_recorded == 2


def test_what_changes_now_and_then_is_recorded_anew_each_time():
    bench = Bench()
    for step in range(300):
        if step % 30 == 0:  # as an evaluation does for which the weights are rounded
            weight = bench.model[0].weight
            weight.data = weight.data.clone()
        bench(4)
    assert bench.recordings.stopped is None
    assert bench.recorder.num_recorded == 10


def test_where_blocks_are_checkpointed_a_shape_runs_op_by_op_after_each_change():
    bench = Bench(returns=Returns(unlimited))
    bench.recorder.marks = [4]
    for rows in (4, 4, 4, 6, 6):
        bench(rows)
    assert bench.recorder.num_recorded == 2
    bench.recordings.forget()
    for rows in (4, 6, 4, 6):
        bench(rows)
    assert bench.recorder.num_recorded == 4
    assert all(draws.marks for draws in bench.recorder.draws)


def test_a_change_that_checkpoints_blocks_is_seen_before_anything_is_recorded():
    bench = Bench(returns=Returns(unlimited))
    for _ in range(4):
        bench(4)
    bench.recordings.forget()
    bench.recorder.marks = [4]
    bench(4)
    bench(4)
    assert [draws.marks for draws in bench.recorder.draws] == [[], [4]]


def test_what_changes_at_every_step_is_not_recorded_for_ever():
    bench = Bench()
    for step in range(20):
        bench.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        bench(4)
    assert bench.recorder.num_recorded <= 6
    assert bench.told[-1][0] == "eager"


class Drawing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if random.random() < 2 else 0.0)


class Keeping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "word"), [(Drawing(2, 1), "LayerDrop"), (Keeping(2, 1), "'last'")]
)
def test_a_step_that_leaves_something_on_the_host_stays_op_by_op(model, word):
    bench = Bench(model)
    for _ in range(4):
        bench(4)
    assert bench.recorder.num_recorded == 0
    assert bench.told[-1][0] == "eager"
    assert word in bench.told[-1][1]


def test_a_recording_that_fails_twice_ends_recording_and_names_the_line():
    bench = Bench()
    bench.recorder.fails = RuntimeError("operation not permitted when stream is capturing")
    for _ in range(5):
        bench(4)
    assert bench.shortening.num_undone == 1
    assert bench.recordings.stopped is not None
    assert "test_recorded.py line" in bench.recordings.stopped
    assert "on the host" in bench.recordings.stopped


def test_a_new_shape_that_fails_is_tried_again_after_a_step_of_its_own():
    bench = Bench()
    for _ in range(3):
        bench(4)
    bench.recorder.fails = RuntimeError("not yet")
    bench(8)
    bench.recorder.fails = None
    bench(8)
    bench(8)
    assert bench.recordings.stopped is None
    assert bench.recorder.num_recorded == 2


def test_things_that_are_no_tensors_are_part_of_the_shape_or_end_recording():
    bench = Bench()
    for flag in (True, True, True, False, False):
        bench(4, flag=flag)
    assert bench.recorder.num_recorded == 2
    bench(4, thing=object())
    assert bench.recordings.stopped is not None
