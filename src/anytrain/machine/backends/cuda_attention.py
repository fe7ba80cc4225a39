"""Attention over short texts by the kernel that is fastest for them.

On a Hopper GPU torch asks cuDNN first. Where there are at most 64 keys and a head is at most 64
wide, torch's memory-efficient kernel took 0.5 to 0.9 of cuDNN's time on an H200, forward and
backward together, with a mask, causal and without. And it needs no plan for each shape, which
cuDNN makes in 0.16 s.

INVARIANT: which kernel is taken depends on shapes and types alone, so that a step which runs op
by op, a recorded one and the recomputation of a checkpointed block drop the same values.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

_MOST = 64
_HALVES = (torch.bfloat16, torch.float16)
_HOPPER = 9
_KINDS: Any = SDPBackend
_CUDNN, _EFFICIENT = int(_KINDS.CUDNN_ATTENTION), int(_KINDS.EFFICIENT_ATTENTION)


def attend_quickly(device: torch.device) -> None:
    """Let attention over short texts take the faster kernel, in this process, where that is known.

    Torch's own choice stands on other devices, in deterministic mode, in compiled code, and where
    the user has named kernels (`torch.nn.attention.sdpa_kernel`).
    """
    own = functional.scaled_dot_product_attention
    if device.type != "cuda" or hasattr(own, "is_quick") or not _asks_cudnn_first(device):
        return

    @wraps(own)
    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **by: Any
    ) -> torch.Tensor:
        if torch.compiler.is_compiling() or not is_short(query, key, value):
            return own(query, key, value, *more, **by)
        order = torch._C._get_sdp_priority_order()
        if order[0] != _CUDNN or torch.are_deterministic_algorithms_enabled():
            return own(query, key, value, *more, **by)
        torch._C._set_sdp_priority_order([_EFFICIENT, *(o for o in order if o != _EFFICIENT)])
        try:
            return own(query, key, value, *more, **by)
        finally:
            torch._C._set_sdp_priority_order(order)

    attend.is_quick = True  # type: ignore[attr-defined]
    functional.scaled_dot_product_attention = attend


def is_short(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether attention is over few enough keys, in a type that cuDNN would take."""
    if query.dim() != 4 or query.dtype not in _HALVES or query.device.type != "cuda":
        return False
    sizes = (query.size(-2), key.size(-2), query.size(-1), value.size(-1))
    return max(sizes) <= _MOST


def _asks_cudnn_first(device: torch.device) -> bool:
    """Whether torch's first choice is cuDNN here; to ask also makes torch set its order."""
    if torch.version.hip or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return False
    some = torch.zeros(1, 1, 8, _MOST, dtype=torch.bfloat16, device=device)
    try:
        return bool(torch._fused_sdp_choice(some, some, some) == _CUDNN)
    except (AttributeError, RuntimeError):  # a torch whose choice cannot be asked for
        return False
