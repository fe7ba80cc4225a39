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

from anytrain.fast.recorded import recordings
from anytrain.fast.recorded.cuda_graph import Draws
from anytrain.fast.recorded.payback import Payback, unlimited
from anytrain.fast.recorded.recordings import Outside, Recordings
from anytrain.fast.shortcuts.shortcuts import Shortening


class Again:
    """Replay by running the work once more."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0
        self.problem: str | None = None
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

    def reduce(self, because: str) -> bool:
        self.num_undone += 1
        return super().reduce(because)


class Bench:
    is_whole = True

    def __init__(self, model: nn.Module | None = None, **more: Any) -> None:
        self.model = model or nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.recorder, self.told, self.shortening = Again(), [], Plain()
        self.recordings = Recordings(
            self.recorder,
            self.model,
            (self.optimizer,),
            lambda value, because: self.told.append((value, because)),
            **more,
        )

    def compute(self, tree: Any) -> torch.Tensor:
        return self.model(tree["x"]).sum().detach()

    def __call__(self, rows: int, **more: Any) -> torch.Tensor:
        tree = {"x": torch.rand(rows, 2, device="cpu"), **more}
        found = self.recordings.find(self, tree, "step")
        if found is None:
            with self.recordings.observed(self):
                return self.compute(tree)
        recording, tensors = found
        result = recording(tensors)
        assert torch.equal(result, self.compute(tree))
        return result


@pytest.fixture(autouse=True)
def _host_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_is_elsewhere", lambda tensor: False)


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


def test_each_shape_has_its_own_recording_up_to_a_bound():
    bench = Bench(returns=Payback(unlimited))
    for rows in [1, 1, *range(1, 12), *range(1, 12)]:
        bench(rows)
    assert bench.recorder.num_recorded == recordings.MOST_SHAPES
    assert "length_buckets" in bench.told[-1][1]


def test_a_recording_that_is_not_used_any_more_makes_room_for_another():
    value = [0]
    bench = Bench(outside=Outside(looked_up=lambda: tuple(value)))
    for epoch in range(20):  # as a weight of the loss that changes with each
        value[0] = epoch
        for _ in range(40):
            bench(4)
    assert bench.recorder.num_recorded == 20
    assert len(bench.recordings._known) == recordings.MOST_SHAPES
    assert bench.recorder.num_replayed > 20 * 30


def test_a_shape_that_may_never_come_again_is_not_recorded_at_first_sight():
    bench = Bench()
    for rows in (1, 1, 1, 2, 3, 4, 5, 6, 7):
        bench(rows)
    assert bench.recorder.num_recorded == 1
    bench(7)
    bench(7)
    assert bench.recorder.num_recorded == 2


def test_a_shape_that_is_known_to_come_again_is():
    bench = Bench(returns=Payback(are_few=lambda: True))
    for rows in (1, 1, 2, 3):
        bench(rows)
    assert bench.recorder.num_recorded == 2


@pytest.mark.parametrize(("num_steps", "num_recorded"), [(20, 0), (600, recordings.MOST_SHAPES)])
def test_shapes_are_recorded_where_the_rest_of_the_run_repays_it(num_steps, num_recorded):
    left = list(range(num_steps, 0, -1))
    bench = Bench(returns=Payback(lambda: left[0]))
    while left:
        bench(len(left) % 12 + 1)
        left.pop(0)
    assert bench.recorder.num_recorded == num_recorded
    assert ("repay" in bench.told[-1][1]) is (num_recorded == 0)


def test_a_short_run_records_no_more_of_its_buckets_than_it_repays():
    left = list(range(20, 0, -1))
    bench = Bench(returns=Payback(lambda: left[0], lambda: True))
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
        lambda bench: bench.optimizer.state[bench.model[0].weight].update(m=torch.ones(1)),
        lambda bench: bench.model[0].weight.register_hook(lambda gradient: None),
        lambda bench: bench.optimizer.register_step_post_hook(lambda *given: None),
    ],
    ids=[
        *("mode", "frozen", "storage", "rate", "dropout", "loaded", "moment", "hook"),
        "hook of the optimizer",
    ],
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


def test_a_change_before_the_first_recording_is_seen_too():
    bench = Bench(returns=Payback(unlimited))
    bench(4)
    bench(4)
    bench.model[1].p = 0.5  # what was watched was another step
    bench.model.eval()
    bench(4)
    assert bench.recorder.num_recorded == 0
    bench(4)
    assert bench.recorder.num_recorded == 1


def test_nothing_is_compared_while_no_recording_would_be_repaid(monkeypatch):
    left = [1]
    bench = Bench(returns=Payback(lambda: left[0]))
    with monkeypatch.context() as patch:
        patch.setattr(recordings.Assumptions, "hold", lambda facts: pytest.fail("compared"))
        for _ in range(4):
            bench(4)
    bench.model[1].p = 0.5
    bench.model.eval()
    left[0] = 100
    bench(4)  # op by op: what was watched was another step
    assert bench.recorder.num_recorded == 0
    bench(4)
    assert bench.recorder.num_recorded == 1


def test_a_shape_that_ran_before_a_change_runs_again_before_it_is_recorded():
    left = [1]
    bench = Bench(returns=Payback(lambda: left[0]))
    bench.recorder.marks = [3]  # of checkpointed blocks: each shape is watched by itself
    for _ in range(4):
        bench(4)
    bench.model[1].p = 0.5
    bench.model.eval()
    bench(6)  # another shape is watched, with the model as it is now
    left[0] = 100
    bench(4)
    assert bench.recorder.num_recorded == 0


def test_a_value_that_the_users_code_looks_up_is_part_of_the_shape():
    value = [1.0]
    bench = Bench(outside=Outside(looked_up=lambda: tuple(value)))
    for _ in range(4):
        bench(4)
    value[0] = 2.0
    for _ in range(3):
        bench(4)
    assert bench.recorder.num_recorded == 2


def test_what_stands_in_the_way_is_looked_for_before_each_recording():
    hooks: list[str] = []
    bench = Bench(outside=Outside(obstacle=lambda: hooks[0] if hooks else None))
    for _ in range(4):
        bench(4)
    assert bench.recorder.num_recorded == 1
    hooks.append("a hook on the parameter is called at every step")
    for _ in range(4):
        bench(6)
    assert bench.recordings.stopped == hooks[0]


def test_recordings_that_cannot_be_trusted_are_given_up():
    bench = Bench()
    for _ in range(4):
        bench(4)
    bench.recorder.problem = "it draws other numbers"
    bench(4)
    assert bench.recordings.stopped == "it draws other numbers"


def test_sparse_tensors_are_not_held_for_a_recording():
    bench = Bench()
    for _ in range(3):
        bench(4, more=torch.eye(3).to_sparse())
    assert "sparse" in str(bench.recordings.stopped)


class Sloping(Bench):
    """A step that looks at the slope of its result."""

    def compute(self, tree: Any) -> torch.Tensor:
        x = tree["x"].requires_grad_()
        (slope,) = torch.autograd.grad(self.model(x).square().sum(), x, create_graph=True)
        return slope.square().sum().detach()


def test_a_step_may_ask_for_gradients_of_its_batch():
    bench = Sloping()
    for _ in range(5):
        bench(4)
    assert (bench.recorder.num_recorded, bench.recorder.num_replayed) == (1, 3)


def test_a_batch_that_is_learnt_itself_stays_op_by_op():
    bench = Bench()
    learnt = torch.zeros(3, requires_grad=True)
    for _ in range(5):
        bench(4, learnt=learnt)
    assert bench.recorder.num_recorded == 0
    assert "learnt" in str(bench.recordings.stopped)


class Book(nn.Module):
    """Replaces its buffer in a method that is not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.zeros(2))

    def ema(self, x: torch.Tensor) -> torch.Tensor:
        self.code = self.code * 0.9 + x.detach().mean(0) * 0.1
        return x + self.code


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.book, self.last = Book(), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.book.ema(x))


def test_a_buffer_that_is_replaced_at_every_step_keeps_it_from_being_recorded():
    bench = Bench(Reads())
    for _ in range(4):
        bench(4)
    assert "Book has another tensor as its 'code'" in str(bench.recordings.stopped)


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        object.__setattr__(self, "kept", (x, x))
        return x


def test_a_tuple_of_tensors_that_a_module_keeps_is_no_error():
    bench = Bench(nn.Sequential(Pair(), nn.Linear(2, 1)))
    for _ in range(4):
        bench(4)
    assert "Pair keeps something in its attribute 'kept'" in str(bench.recordings.stopped)


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
    bench = Bench(returns=Payback(unlimited))
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
    bench = Bench(returns=Payback(unlimited))
    for _ in range(4):
        bench(4)
    bench.recordings.forget()
    bench.recorder.marks = [4]
    for _ in range(3):
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


class Scripted(Again):
    """Fail where a scripted function is recorded as torch has compiled it."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[bool] = []

    def record(self, work: Any, draws: Draws | None) -> Any:
        self.tried.append(is_as_written())
        if not self.tried[-1]:
            raise RuntimeError("The following operation failed in the TorchScript interpreter.")
        return super().record(work, draws)


@torch.jit.script
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def is_as_written() -> bool:
    return not isinstance(doubled, torch.jit.ScriptFunction)


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled(super().forward(x))


def test_a_scripted_function_that_cannot_be_recorded_is_recorded_as_it_is_written():
    bench = Bench(Doubling(2, 1))
    bench.recorder = bench.recordings._recorder = Scripted()
    for _ in range(5):
        bench(4)
    assert bench.recorder.tried == [False, True]
    assert (bench.recorder.num_recorded, bench.recorder.num_replayed) == (1, 3)
    assert bench.shortening.num_undone == 0
    assert not is_as_written()


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
    assert "test_recordings.py line" in bench.recordings.stopped
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
