"""Bound a gradient's norm.

In host memory the norm can be read at once, so gradients are multiplied only where it is above
the bound: elsewhere the factor is 1. The values are those of torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from anytrain.engine.step.guard import Guarded, ScaledGuard

_SURELY_BELOW = 0.999
"""Below this share of the bound no rounding can make the factor less than 1."""

Measure = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Clipped(Guarded, Protocol):
    """An optimizer with its guard, and the one that it prepared."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


class Clip:
    """Bound the norm of the model's gradient and return it, on the device; 0 only measures."""

    def __init__(
        self,
        optimizer: Clipped,
        model: nn.Module,
        max_norm: float,
        measure: Measure,
        *,
        untrained: tuple[nn.Parameter, ...] = (),
        sees_all: bool,
        can_read: bool,
    ) -> None:
        self._optimizer, self._model = optimizer, model
        # Only an optimizer's own gradients are scaled back.
        is_scaled = isinstance(optimizer.guard, ScaledGuard)
        self._left_out = {id(p) for p in untrained} if is_scaled else set()
        self._max_norm, self._measure = max_norm, measure
        self._can_read = can_read
        self._sees_all = sees_all
        """Whether nobody changes a gradient afterwards: the guard need not look again."""

    def __call__(self) -> torch.Tensor:
        """Clip, and let the guard know the norm."""
        found = [p for p in self._model.parameters() if id(p) not in self._left_out]
        guard = self._optimizer.guard
        if isinstance(guard, ScaledGuard):
            guard.unscale(self._optimizer.optimizer)
        norm = bound(found, self._max_norm, self._measure, can_read=self._can_read)
        guard.veto(norm, is_whole=self._sees_all)
        return norm


def bound(
    parameters: Sequence[torch.Tensor], max_norm: float, measure: Measure, *, can_read: bool = False
) -> torch.Tensor:
    """Return the norm of all gradients, and scale them down to `max_norm`; 0 only measures.

    `measure` is the strategy's: it knows what of the gradient lies on other ranks.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = measure(grads)
    if max_norm > 0 and not (can_read and norm.item() < _SURELY_BELOW * max_norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
