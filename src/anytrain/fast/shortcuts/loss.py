"""The loss over a vocabulary, without a float32 copy of its softmax and of its gradient.

Language models turn their logits to float32 and take the cross-entropy: passes over gigabytes. The
values are the same here. Only logits that come straight from a head in bfloat16 are taken; whatever
else is asked for goes to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from anytrain.core import patches
from anytrain.fast.kernels.step import Kernels, loss_backward, loss_forward
from anytrain.fast.shortcuts.lazy_tensor import head_of
from anytrain.fast.shortcuts.refusals import once


@contextmanager
def losses(kernels: Kernels) -> Iterator[None]:
    """Let torch's cross-entropy in the block go through the kernels, where it can."""
    own = functional.cross_entropy

    def cross_entropy(input: Any, target: Any, *given: Any, **more: Any) -> Any:  # noqa: A002
        if not given:  # the rest is given by name, as everybody does
            found = _taken(kernels, input, target, **more)
            if found is not None:
                return found
        return own(input, target, *given, **more)

    with patches.replaced("cross-entropy", functional, cross_entropy=cross_entropy):
        yield


def _taken(
    kernels: Kernels,
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **old: Any,
) -> torch.Tensor | None:
    """Return the loss; None where it is torch's to compute."""
    if weight is not None or label_smoothing or any(value is not None for value in old.values()):
        return None
    if reduction not in ("mean", "sum"):
        return None
    whole = _source(logits, targets)
    if whole is None:
        return None
    found = _loss(whole, targets, logits.shape[1], ignore_index, kernels)
    total: torch.Tensor = found.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _source(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    """Return the rounded matrix that holds these logits; None where they are others."""
    head = head_of(logits)
    if head is None:
        return None
    are_rows = logits.dim() == 2 and logits.shape[1] == head.seen.shape[-1]
    are_targets = targets.dtype == torch.int64 and targets.shape == logits.shape[:1]
    is_plain = targets.is_contiguous() and head.whole.is_contiguous()
    return head.whole if are_rows and are_targets and is_plain else None


class _Loss(torch.autograd.Function):
    """The cross-entropy of each row."""

    @staticmethod
    def forward(
        ctx: Any, whole: Any, targets: Any, width: int, ignored: int, kernels: Kernels
    ) -> Any:
        rows = whole.view(-1, whole.shape[-1])
        losses, logs = loss_forward(kernels, rows, width, targets, ignored)
        ctx.save_for_backward(whole, targets, logs)
        ctx.how = width, ignored, kernels
        ctx.set_materialize_grads(False)
        return losses

    @staticmethod
    @once
    def backward(ctx: Any, *given: Any) -> Any:
        if given[0] is None:
            return (None,) * 5
        whole, targets, logs = ctx.saved_tensors
        width, ignored, kernels = ctx.how
        rows = whole.view(-1, whole.shape[-1])
        made = loss_backward(kernels, (rows, targets, logs), width, ignored, given[0].contiguous())
        return made.view(whole.shape), None, None, None, None


_loss: Callable[..., torch.Tensor] = _Loss.apply
