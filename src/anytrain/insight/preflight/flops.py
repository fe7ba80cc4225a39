"""Count the floating-point operations of one call: two for each multiplication and addition."""

from __future__ import annotations

import math
from typing import Any

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
