"""The step of a user's own loop, recorded: a loop may change how many batches make a step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.engine.prepared.cursor import Accumulation, Cursor
from anytrain.engine.step.eager import RecordedStep
from anytrain.engine.step.recorded import recordings
from anytrain.engine.step.recorded.cuda_graph import Draws
from anytrain.engine.step.recorded.recordings import Recordings
from anytrain.engine.step.recorded.returns import Returns, unlimited
from anytrain.engine.step.shortcuts.shortcuts import Shortening


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

    def step(self) -> None:
        self.num_updates += 1

    def update(self, optimizer: Any, skipped: Any) -> None:
        self.num_updates += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def veto(self, value: Any) -> None:
        pass

    count_update = decide = lambda self: None


def test_batches_that_end_no_step_make_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_is_elsewhere", lambda tensor: False)
    cursor, model = Cursor(Accumulation(1)), nn.Linear(2, 1)
    optimizer, shortcuts = Prepared(model), Shortcuts()
    step = RecordedStep(
        loss_fn=lambda model, batch: model(batch).sum(),
        model=model,
        ends_update=cursor.next_micro,
        no_sync=lambda model: nullcontext(),
        backward=lambda loss: loss.backward(),
        clip=None,
        optimizers=(optimizer,),
        schedulers=(),
        add_up=lambda loss: None,
        recordings=Recordings(
            Again(), model, (optimizer.optimizer,), lambda *told: None, returns=Returns(unlimited)
        ),
        num_micro=lambda: cursor.accumulation.num_steps,
        shortening=Shortening(shortcuts, ()),
    )
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
