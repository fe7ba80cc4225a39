"""Bound a gradient's norm.

In host memory the norm can be read at once, so gradients are multiplied only where it is above
the bound: elsewhere the factor is 1. The values are those of torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SURELY_BELOW = 0.999
"""Below this share of the bound no rounding can make the factor less than 1."""


def bound(
    parameters: Sequence[torch.Tensor], max_norm: float, *, can_read: bool = False
) -> torch.Tensor:
    """Return the norm of all gradients, and scale them down to `max_norm`; 0 only measures."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if can_read and _are_plain(grads):
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if max_norm > 0 and not norm.item() < _SURELY_BELOW * max_norm:
            torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm
    if max_norm > 0:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return torch.nn.utils.get_total_norm(grads)


def _are_plain(grads: list[torch.Tensor]) -> bool:
    """Whether torch's way would be the same few calls: one kind of dense values."""
    return bool(grads) and all(
        grad.dtype is torch.float32 and grad.layout is torch.strided and not grad.requires_grad
        for grad in grads
    )
