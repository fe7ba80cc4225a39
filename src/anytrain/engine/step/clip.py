"""Bound a gradient's norm.

In host memory the norm can be read at once, so gradients are multiplied only where it is above
the bound: elsewhere the factor is 1. The values are those of torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_SURELY_BELOW = 0.999
"""Below this share of the bound no rounding can make the factor less than 1."""

Measure = Callable[[Sequence[torch.Tensor]], torch.Tensor]


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
