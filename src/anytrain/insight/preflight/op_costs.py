"""What one operation costs: its arithmetic, scratch memory on a GPU, and waits of the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

_CONVOLUTION_BACKWARD: Any = torch.ops.aten.convolution_backward.default


def flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the operations of a matrix product, convolution or attention; else 0."""
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    if func is _CONVOLUTION_BACKWARD:  # torch's counter looks for results by their places
        made = iter(out)
        out = [next(made) if is_wanted else None for is_wanted in args[-1]]
    try:
        return int(count(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AssertionError, AttributeError):
        return 0  # a form that torch's own counter does not know


def num_bytes(tensors: list[Any]) -> int:
    """Return how many bytes the tensors have."""
    return sum(math.prod(t.shape) * t.element_size() for t in tensors)


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


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say that whether it worked is looked at."""
    return "success"


def _without_a_range(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say that the least and the largest value are looked at, where none are given."""
    least, most = ((*args, *(0, 0))[2:4]) if len(args) > 2 else (0, 0)
    return "range" if kwargs.get("min", least) == kwargs.get("max", most) else ""


_WAITS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], str]] = {
    aten._linalg_check_errors.default: _always,
    aten._linalg_eigh.default: _always,
    aten._linalg_eigvals.default: _always,
    aten._linalg_svd.default: _always,
    aten.linalg_eig.default: _always,
    aten.linalg_eigvals.default: _always,
    aten.linalg_lstsq.default: _always,
    aten.linalg_pinv.atol_rtol_tensor: _always,
    aten.histc.default: _without_a_range,
}


def wait_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what an operation's own code reads on the host, on CUDA; "" where it reads nothing."""
    find = _WAITS.get(func)
    return "" if find is None else find(args, kwargs)
