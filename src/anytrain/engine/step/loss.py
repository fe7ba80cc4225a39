"""The loss over a vocabulary, without a float32 copy of its softmax and of its gradient.

Language models turn their logits to float32 and take the cross-entropy: passes over gigabytes. The
values are the same here. Only logits that come straight from a head in bfloat16 are taken; whatever
else is asked for goes to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from anytrain.machine.backends.cuda_kernels import Kernels, loss_backward, loss_forward

_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
_CAST = "ToCopyBackward0"


class Head(NamedTuple):
    """What a head has made last."""

    seen: torch.Tensor
    """As the model got it."""
    version: int
    """Another one, once something was written to it."""
    whole: torch.Tensor
    """The same with the columns that nobody sees, which may be none."""


class Losses:
    """Cross-entropies of what a head has made."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.head: Head | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let torch's cross-entropy in the block go through the kernels, where it can."""
        own = functional.cross_entropy

        def cross_entropy(input: Any, target: Any, *given: Any, **more: Any) -> Any:  # noqa: A002
            if not given:  # the rest is given by name, as everybody does
                found = self._taken(input, target, **more)
                if found is not None:
                    return found
            return own(input, target, *given, **more)

        functional.cross_entropy = cross_entropy
        try:
            yield
        finally:
            functional.cross_entropy = own
            self.head = None

    def _taken(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        **more: Any,
    ) -> torch.Tensor | None:
        """Return the loss; None where it is torch's to compute."""
        if any(more.values()) or reduction not in ("mean", "sum"):  # weights, smoothing
            return None
        whole = self._source(logits, targets)
        if whole is None:
            return None
        losses = _loss(whole, targets, logits.shape[1], ignore_index, self._kernels)
        self.head = None
        total: torch.Tensor = losses.sum()
        return total if reduction == "sum" else total / (targets != ignore_index).sum()

    def _source(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Return the rounded matrix that holds these logits; None where they are others."""
        if self.head is None:
            return None
        seen, version, whole = self.head
        are_rows = logits.dim() == 2 and logits.shape[1] == seen.shape[-1]
        are_all = logits.numel() == seen.numel() and targets.shape == logits.shape[:1]
        is_plain = targets.dtype == torch.int64 and targets.is_contiguous()
        if not (are_rows and are_all and is_plain and whole.is_contiguous()):
            return None
        is_copy = logits.dtype != seen.dtype
        is_unchanged = seen._version == version and logits._version == (0 if is_copy else version)
        return whole if is_unchanged and _comes_from(logits, seen) else None


def _comes_from(logits: torch.Tensor, seen: torch.Tensor) -> bool:
    """Whether the one is the other in another shape, or a float32 copy of it."""
    node: Any = logits.grad_fn
    casts = 0 if logits.dtype == seen.dtype else 1
    while node is not None and node is not seen.grad_fn:
        casts -= node.name() == _CAST
        if casts < 0 or node.name() not in {_CAST, *_VIEWS}:
            return False
        node = node.next_functions[0][0]
    return node is not None and logits.dtype in (seen.dtype, torch.float32)


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
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Any) -> Any:
        whole, targets, logs = ctx.saved_tensors
        width, ignored, kernels = ctx.how
        rows = whole.view(-1, whole.shape[-1])
        made = loss_backward(kernels, (rows, targets, logs), width, ignored, given[0].contiguous())
        return made.view(whole.shape), None, None, None, None


_loss: Callable[..., torch.Tensor] = _Loss.apply
