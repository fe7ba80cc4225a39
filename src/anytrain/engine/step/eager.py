"""The whole training step as one function: forward, backward, clip, update, schedule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn


class StepOutput(NamedTuple):
    """What a step leaves behind, as device tensors: reading one is the only wait."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
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
        if not self.ends_update():
            with self.no_sync(self.model):
                loss = self.loss_fn(self.model, batch)
                self.backward(loss)
            return StepOutput(loss.detach(), None)
        loss = self.loss_fn(self.model, batch)
        self.backward(loss)
        norm = None if self.clip is None else self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return StepOutput(loss.detach(), norm)
