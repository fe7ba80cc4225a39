"""What a GPU's kernels take for themselves while they run: no tensor, so no operation shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

aten: Any = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


class Scratch(NamedTuple):
    """Memory that is taken and given back within one operation."""

    num_bytes: int
    is_certain: bool
    """Whether torch's own code takes it, and not a library that may choose another way."""


def _attention(given: list[torch.Tensor]) -> Scratch | None:
    """Halves sum the queries' gradients in float32, and each kernel keeps one number a row."""
    query = given[1]
    rows = query.numel() // max(query.size(-1), 1)
    sums = 4 * query.numel() if query.dtype in _HALVES else 0
    return Scratch(sums + 4 * rows, is_certain=True)


def _convolution(given: list[torch.Tensor], made: list[torch.Tensor]) -> Scratch:
    """cuDNN may turn what it reads and writes around in memory, channels last: one copy of each."""
    tensors = [t for t in (*given, *made) if t.dim() > 1]
    return Scratch(sum(t.numel() * t.element_size() for t in tensors), is_certain=False)


_TAKES: dict[Any, Callable[[list[torch.Tensor], list[torch.Tensor]], Scratch | None]] = {
    aten._scaled_dot_product_flash_attention_backward.default: lambda g, m: _attention(g),
    aten._scaled_dot_product_efficient_attention_backward.default: lambda g, m: _attention(g),
    aten._scaled_dot_product_cudnn_attention_backward.default: lambda g, m: _attention(g),
    aten.convolution.default: _convolution,
    # Its two halves run one after the other, and neither turns the other's result around.
    aten.convolution_backward.default: lambda g, m: _convolution(g, []),
}


def scratch(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> Scratch | None:
    """Return what an operation's kernels take on CUDA; None where that is nothing to speak of."""
    take = _TAKES.get(func)
    return None if take is None else take(given, made)
