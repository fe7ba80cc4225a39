"""The whole step of a user's own loop as one function: forward, backward, clip, update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from anytrain.engine.step.recorded.recordings import Recordings
from anytrain.engine.step.shortcuts.shortcuts import Shortcuts, Shortening
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
    add_up: Callable[[torch.Tensor], None]
    """Given each loss once it is through; one of a recording is a copy that stays as it is."""

    def __call__(self, batch: Any) -> StepOutput:
        """Train on one batch; the update comes when the accumulated step is complete."""
        output = self.take(batch)
        self.add_up(output.loss)
        return output

    def take(self, batch: Any) -> StepOutput:
        """Take the step."""
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
    num_micro: Callable[[], int] = field(kw_only=True)
    """Asked how many batches make a step: a loop may change it on its way."""
    shortening: Shortening = field(kw_only=True)
    _ends: bool = True

    def take(self, batch: Any) -> StepOutput:
        """Take the step, by its recording where there is one."""
        ends = self._ends = self.ends_update()
        found = self.recordings.find(self, batch, (ends, self.num_micro()))
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

    @property
    def is_whole(self) -> bool:
        """Whether one micro-batch is the step: shortcuts are taken of such steps alone."""
        return self.num_micro() == 1

    def compute(self, tree: Any) -> StepOutput:
        """Do the device's part of a step."""
        shortcuts = self._shortcuts()
        if shortcuts is None:
            return self.run(tree, self._ends)
        with shortcuts.forward():
            loss = self.loss_fn(self.model, tree)
            self.backward(loss)
        norm = shortcuts.measure()
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
            optimizer.zero_grad(set_to_none=self.is_whole)  # those that are added to stay in place

    def _shortcuts(self) -> Shortcuts | None:
        return self.shortening.taken if self.is_whole else None

    def _update_on_device(self) -> None:
        shortcuts = self._shortcuts()
        if shortcuts is not None:
            shortcuts.update(self.optimizers[0].guard.decide())
            shortcuts.clear()
            return
        for optimizer in self.optimizers:
            with capturable(optimizer.optimizer):
                optimizer.guard.update(optimizer.optimizer, None)
