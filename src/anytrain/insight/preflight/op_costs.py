"""What one operation costs: its arithmetic, scratch memory on a GPU, and waits of the host."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

aten: Any = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_ATTENTION_BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
# torch's pages on linear algebra name what checks its own success on the host; the variants that
# end in `_ex` leave that to the caller, and do not wait.
_CHECKED = frozenset(
    (
        aten._linalg_check_errors.default,
        aten._linalg_eigh.default,
        aten._linalg_eigvals.default,
        aten._linalg_svd.default,
        aten.linalg_eig.default,
        aten.linalg_eigvals.default,
        aten.linalg_lstsq.default,
        aten.linalg_pinv.atol_rtol_tensor,
    )
)


def flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the floating-point operations of a matrix product, convolution or attention; else 0.

    A multiplication and an addition are two.
    """
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    if (
        func is aten.convolution_backward.default
    ):  # torch's counter looks for results by their places
        made = iter(out)
        out = [next(made) if is_wanted else None for is_wanted in args[-1]]
    try:
        return int(count(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AssertionError, AttributeError):
        return 0  # a form that torch's own counter does not know


def num_bytes(tensors: list[Any]) -> int:
    """Return how many bytes the tensors have."""
    return sum(math.prod(t.shape) * t.element_size() for t in tensors)


class Scratch(NamedTuple):
    """Memory that a kernel takes for itself while it runs: no tensor, so no operation shows it."""

    num_bytes: int
    is_certain: bool
    """Whether torch's own code takes it, and not a library that may choose another way."""


def scratch(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> Scratch | None:
    """Return what an operation's kernels take on CUDA; None where that is nothing to speak of."""
    if func in _ATTENTION_BACKWARD:
        # Halves sum the queries' gradients in float32, and each kernel keeps one number a row.
        query = given[1]
        rows = query.numel() // max(query.size(-1), 1)
        sums = 4 * query.numel() if query.dtype in _HALVES else 0
        return Scratch(sums + 4 * rows, is_certain=True)
    if func not in (aten.convolution.default, aten.convolution_backward.default):
        return None
    # cuDNN may turn what it reads and writes to channels last: one copy of each. The two halves of
    # backward run one after the other, and neither turns the other's result.
    turned = (*given, *made) if func is aten.convolution.default else given
    return Scratch(num_bytes([t for t in turned if t.dim() > 1]), is_certain=False)


def wait_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what an operation's own code reads on the host, on CUDA; "" where it reads nothing."""
    if func in _CHECKED:
        return "success"
    if func is not aten.histc.default:
        return ""
    least, most = ((*args, *(0, 0))[2:4]) if len(args) > 2 else (0, 0)
    return "range" if kwargs.get("min", least) == kwargs.get("max", most) else ""
