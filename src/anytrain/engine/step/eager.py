"""The whole step of a user's own loop as one function: forward, backward, clip, update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from anytrain.engine.step.recorded import Recordings
from anytrain.engine.step.shortcuts import Shortcuts
from anytrain.engine.step.update import capturable


class StepOutput(NamedTuple):
    """What a step leaves behind, as device tensors: reading one is the only wait."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None


@dataclass(slots=True)
class EagerStep:
    """Run a step op by op."""

    loss_fn: Callable[[nn.Module, Any], Any]
    model: nn.Module
    ends_update: Callable[[], bool]
    no_sync: Callable[[nn.Module], AbstractContextManager[None]]
    backward: Callable[[torch.Tensor], None]
    clip: Callable[[], torch.Tensor] | None
    optimizers: tuple[Any, ...]
    schedulers: tuple[Any, ...]

    def __call__(self, batch: Any) -> StepOutput:
        """Train on one batch; the update comes when the accumulated step is complete."""
        return self.run(batch, self.ends_update())

    def run(self, batch: Any, ends_update: bool) -> StepOutput:
        """Train on one batch, with or without an update behind it."""
        if not ends_update:
            with self.no_sync(self.model):
                loss = self.loss_fn(self.model, batch)
                self.backward(loss)
            return StepOutput(loss.detach(), None)
        loss = self.loss_fn(self.model, batch)
        self.backward(loss)
        norm = None if self.clip is None else self.clip()
        self.update()
        return StepOutput(loss.detach(), norm)

    def update(self) -> None:
        """Update weights and rates, and clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@dataclass(slots=True)
class RecordedStep(EagerStep):
    """Run a step as a recording of its device work, where that can be."""

    recordings: Recordings = field(kw_only=True)
    settings: Callable[[], tuple[Any, ...]] = field(kw_only=True)
    accumulates: bool = field(kw_only=True)
    """Whether gradients outlive a batch: then they keep their place."""
    shortcuts: Shortcuts | None = field(default=None, kw_only=True)
    """What does parts of a recorded step in fewer launches; None where torch does them."""
    without_shortcuts: str = field(default="", kw_only=True)
    """Why there are none any more."""
    _ends: bool = True

    def __call__(self, batch: Any) -> StepOutput:
        """Train on one batch; the update comes when the accumulated step is complete."""
        ends = self._ends = self.ends_update()
        found = self.recordings.find(self, batch, ends, self.settings())
        if found is None:
            with self.recordings.observed(self):
                return self.run(batch, ends)
        if ends:
            for scheduler in self.schedulers:
                scheduler.walk()
        recording, tensors = found
        output: StepOutput = recording(tensors)
        if ends:
            for optimizer in self.optimizers:
                optimizer.count_update()
        # The next replay writes over what this one returned, and a loop may keep it.
        norm = output.grad_norm
        return StepOutput(output.loss.clone(), None if norm is None else norm.clone())

    def compute(self, tree: Any) -> StepOutput:
        """Do the device's part of a step."""
        if self.shortcuts is None:
            return self.run(tree, self._ends)
        with self.shortcuts.forward():
            loss = self.loss_fn(self.model, tree)
            self.backward(loss)
        norm = self.shortcuts.measure()
        self.optimizers[0].guard.veto(norm)
        self.update()
        return StepOutput(loss.detach(), None if self.clip is None else norm)

    def update(self) -> None:
        """Update weights and rates; of a recording this is the device's part alone."""
        if not self.recordings.is_recording:
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
        else:
            self._update_on_device()
            for scheduler in self.schedulers:
                scheduler.follow()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not self.accumulates)

    def _update_on_device(self) -> None:
        if self.shortcuts is not None:
            self.shortcuts.update(self.optimizers[0].guard.decide())
            self.shortcuts.clear()
            return
        for optimizer in self.optimizers:
            with capturable(optimizer.optimizer):
                optimizer.guard.update(optimizer.optimizer, None)

    def observed(self) -> AbstractContextManager[None]:
        """Return what an observed step runs in."""
        return nullcontext() if self.shortcuts is None else self.shortcuts.observed()

    def is_ready(self) -> bool:
        """Whether a recording may begin: the first time on a machine kernels are compiled."""
        return self.shortcuts is None or self.shortcuts.is_done

    def prepare(self) -> None:
        """Make what must be there before a recording begins."""
        if self.shortcuts is not None and not self.shortcuts.are_there:
            self.without_shortcuts = self.shortcuts.problem
            self.shortcuts = None
        if self.shortcuts is not None:
            self.shortcuts.prepare(is_whole=True)

    def settle(self) -> None:
        """Fill in what is known once the step is recorded."""
        if self.shortcuts is not None:
            self.shortcuts.settle()

    def undo(self, because: str) -> bool:
        """Clear up what a recording that failed has left; without shortcuts it may work."""
        for optimizer in self.optimizers:
            optimizer.guard.forget()
        shortcuts, self.shortcuts = self.shortcuts, None
        if shortcuts is not None:
            shortcuts.clear()
            self.without_shortcuts = because
        return shortcuts is not None

    def how(self) -> str:
        """Say why torch's own kernels do it all, where that is not as planned."""
        told = self.without_shortcuts
        return f"by torch's own kernels alone: {told}" if told else ""
