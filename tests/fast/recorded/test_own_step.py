"""The step of a user's own loop, recorded: a loop may change how many batches make a step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.engine.prepared.walk import Accumulation, Cursor
from anytrain.engine.step.step import Batch, Step, StepOutput, TorchOps
from anytrain.fast.recorded import recordings
from anytrain.fast.recorded.cuda_graph import Draws
from anytrain.fast.recorded.payback import Payback, unlimited
from anytrain.fast.recorded.recordings import Recordings
from anytrain.fast.recorded.step import RecordedStep
from anytrain.fast.shortcuts.shortcuts import Shortening


class Again:
    """A recorder whose replays run the work once more."""

    problem = None

    def watching(self) -> Any:
        return nullcontext(Draws())

    def record(self, work: Any, draws: Any) -> Any:
        return work, work()

    def release(self) -> None:
        pass

    renew = release

    def is_current(self) -> bool:
        return True


class Shortcuts:
    """Shortcuts without kernels, which count the updates that they make."""

    is_done = are_there = True
    num_updates = 0

    def prepare(self, *, is_whole: bool) -> None:
        pass

    def observed(self) -> Any:
        return nullcontext()

    forward = observed

    def measure(self) -> torch.Tensor:
        return torch.zeros(())

    def update(self, skipped: Any) -> None:
        self.num_updates += 1

    def clear(self) -> None:
        pass

    settle = forget = clear


class Prepared:
    """An optimizer and its guard in one, which count the updates that they make."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer, self.guard = torch.optim.SGD(model.parameters(), lr=0.1), self
        self.num_updates = 0

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.num_updates += 1

    def update(self, optimizer: Any, skipped: Any) -> None:
        self.num_updates += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def note_norm(self, value: Any) -> None:
        pass

    count_update = decide = lambda self: None


def test_batches_that_end_no_step_make_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_is_elsewhere", lambda tensor: False)
    cursor, model = Cursor(Accumulation(1)), nn.Linear(2, 1)
    optimizer, shortcuts = Prepared(model), Shortcuts()

    def micro(model: nn.Module, inputs: Any, items: Any) -> torch.Tensor:
        loss = model(inputs).sum()
        loss.backward()
        return loss.detach()

    ops = TorchOps((optimizer,), (), lambda: None, measures=False)
    inner = Step(model, micro, lambda model: nullcontext(), ops, lets_train=False)
    inner.take = RecordedStep(
        inner,
        Recordings(
            Again(), model, (optimizer.optimizer,), lambda *told: None, returns=Payback(unlimited)
        ),
        Shortening(shortcuts, ()),
    )

    def step(batch: torch.Tensor) -> None:
        ends, num_steps = cursor.next_micro(), cursor.accumulation.num_steps
        inner(Batch((batch,), ends=ends, num_in_step=num_steps))

    for _ in range(4):
        step(torch.rand(3, 2))
    assert shortcuts.num_updates > 0
    cursor.accumulation = replace(cursor.accumulation, num_steps=4)
    before = shortcuts.num_updates
    seen = []
    for _ in range(24):
        number = optimizer.num_updates
        step(torch.rand(3, 2))
        seen.append((cursor.sync, optimizer.num_updates > number))
    assert all(ends is updates for ends, updates in seen), seen
    assert shortcuts.num_updates == before


class Overwriting:
    """Recordings that are replayed from the first step on; each writes over one tensor."""

    def __init__(self) -> None:
        self.loss = torch.zeros(())

    def find(self, work: Any, tree: Any, kind: Any) -> Any:
        def replay(tensors: Any) -> StepOutput:
            return StepOutput(self.loss.copy_(tree[0][0]))

        return replay, ()


def test_what_a_step_returns_is_not_what_the_next_replay_writes_over() -> None:
    ops = TorchOps((), (), lambda: None)
    step = Step(nn.Linear(1, 1), None, lambda model: nullcontext(), ops)  # type: ignore[arg-type]
    step.take = RecordedStep(step, Overwriting(), None)  # type: ignore[arg-type]
    losses = [step(Batch((torch.tensor(v),))).loss for v in (1.0, 2.0, 3.0)]
    assert [loss.item() for loss in losses] == [1.0, 2.0, 3.0]
