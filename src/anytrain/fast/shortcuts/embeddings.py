"""Embeddings whose gradient is three launches, whatever is looked up.

Torch sorts what was looked up in eight passes, or goes through all of it once for each column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytrain.fast.kernels.step import (
    MOST_COLUMNS,
    MOST_LOOKUPS,
    Kernels,
    rows_added,
)
from anytrain.fast.shortcuts.layers import are_plain
from anytrain.fast.shortcuts.lazy_tensor import can_be_read
from anytrain.fast.shortcuts.refusals import once

_NONE = -1
_DENSE: Any = {"memory_format": torch.contiguous_format}


def is_embedding(module: Any) -> bool:
    """Whether it is a table that the kernels know."""
    return (
        type(module).forward is nn.Embedding.forward
        and "forward" not in vars(module)
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
        and module.weight.shape[1] % 4 == 0
        and module.weight.shape[1] <= MOST_COLUMNS
        and are_plain([module.weight])
    )


def can_look_up(module: Any, numbers: Any) -> bool:
    """Whether the kernels can sort what is looked up, and the table is still as they know it."""
    return (
        type(numbers) is torch.Tensor
        and numbers.dtype == torch.int64
        and 0 < numbers.numel() <= MOST_LOOKUPS
        and are_plain([module.weight])
    )


class _Embedding(torch.autograd.Function):
    """Rows of a table."""

    @staticmethod
    def forward(ctx: Any, weight: Any, numbers: Any, left_out: int, kernels: Kernels) -> Any:
        ctx.save_for_backward(numbers)
        ctx.how = kernels, len(weight), left_out
        ctx.set_materialize_grads(False)
        return functional.embedding(numbers, weight)

    @staticmethod
    @once
    def backward(ctx: Any, *given: Any) -> Any:
        if given[0] is None:
            return (None,) * 4
        (numbers,), (kernels, height, left_out) = ctx.saved_tensors, ctx.how
        sent = given[0].reshape(-1, given[0].shape[-1])
        if not can_be_read(sent):
            sent = sent.clone(**_DENSE)
        made = rows_added(kernels, numbers.reshape(-1).contiguous(), sent, height, left_out)
        return made, None, None, None


def look_up(module: Any, numbers: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return the rows of a table; see `is_embedding` and `can_look_up`."""
    left_out = _NONE if module.padding_idx is None else module.padding_idx % len(module.weight)
    return _embedding(module.weight, numbers, left_out, kernels)


_embedding: Callable[..., torch.Tensor] = _Embedding.apply
