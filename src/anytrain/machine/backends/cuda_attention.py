"""Attention over short texts by the kernel that is fastest for them.

On a Hopper GPU torch asks cuDNN first. Where there are at most 64 keys and a head is at most 64
wide, torch's memory-efficient kernel took 0.5 to 0.9 of cuDNN's time on an H200, forward and
backward together, with a mask, causal and without. And it needs no plan for each shape, which
cuDNN makes in 0.16 s.

INVARIANT: which kernel is taken depends on shapes, types and the process's settings alone, so that
a step which runs op by op, a recorded one and the recomputation of a checkpointed block drop the
same values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn.attention import SDPBackend

Attend = Callable[..., Any]
"""A function of a module, its queries, keys and values, and more."""
_MOST = 64
_HALVES = (torch.bfloat16, torch.float16)
_HOPPER = 9
_KINDS: Any = SDPBackend
_CUDNN, _EFFICIENT = int(_KINDS.CUDNN_ATTENTION), int(_KINDS.EFFICIENT_ATTENTION)
_SWITCHES = ("cudnn", "flash", "mem_efficient", "math")


def asks_cudnn_first(device: torch.device) -> bool:
    """Whether torch's first choice is cuDNN on this GPU, and another one is known to be better.

    To ask also makes torch set its order of kernels.
    """
    if torch.version.hip or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return False
    some = torch.zeros(1, 1, 8, _MOST, dtype=torch.bfloat16, device=device)
    try:
        return bool(torch._fused_sdp_choice(some, some, some) == _CUDNN)
    except (AttributeError, RuntimeError):  # a torch whose choice cannot be asked for
        return False


def quick(own: Attend) -> Attend:
    """Return the function with short texts attended by the faster kernel.

    Torch's own choice stands in deterministic mode, in compiled code, and where the user has named
    kernels (`torch.nn.attention.sdpa_kernel`). The order of kernels is one for all threads.
    """
    usual = torch._C._get_sdp_priority_order()
    first = [_EFFICIENT, *(kind for kind in usual if kind != _EFFICIENT)]

    @wraps(own)
    def attend(module: Any, query: Any, key: Any, value: Any, *more: Any, **by: Any) -> Any:
        if torch.compiler.is_compiling() or not is_short(query, key, value) or not _is_free(usual):
            return own(module, query, key, value, *more, **by)
        try:
            torch._C._set_sdp_priority_order(first)
            return own(module, query, key, value, *more, **by)
        finally:
            torch._C._set_sdp_priority_order(usual)

    return attend


def is_short(query: Any, key: Any, value: Any) -> bool:
    """Whether attention is over few enough keys, in a type that cuDNN would take."""
    if not isinstance(query, torch.Tensor) or query.is_nested or query.dim() != 4:
        return False
    if query.dtype not in _HALVES or query.device.type != "cuda":
        return False
    sizes = (query.size(-2), key.size(-2), query.size(-1), value.size(-1))
    return bool(max(sizes) <= _MOST)


def _is_free(usual: list[int]) -> bool:
    """Whether nobody but torch has chosen the kernels."""
    return (
        torch._C._get_sdp_priority_order() == usual
        and all(getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in _SWITCHES)
        and not torch.are_deterministic_algorithms_enabled()
    )
