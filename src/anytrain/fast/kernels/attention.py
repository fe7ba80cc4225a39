"""Attention over short texts by the kernels that are fastest for them.

On a Hopper GPU torch asks cuDNN first. Over at most 128 keys, in bfloat16 and with heads 32 or 64
wide, our own kernels (`short_attention`) took 0.3 to 1.0 of its time on an H200, forward and
backward together; in other cases of at most 64 keys torch's memory-efficient kernel 0.5 to 0.9. And
neither needs a plan for each shape, which cuDNN makes in 0.16 s.

INVARIANT: which kernel is taken depends on shapes, types and the process's settings alone, so that
a step which runs op by op, a recorded one and the recomputation of a checkpointed block drop the
same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anytrain.fast.kernels.short_attention import (
    MOST,
    ShortAttention,
    Wanted,
    attend,
    fits,
)

Attend = Callable[..., Any]
"""A function of a module, its queries, keys and values, and more."""
_MOST = 64
"""Keys, of attention that is not ours; and the width of a head."""
_HALVES = (torch.bfloat16, torch.float16)
_HOPPER = 9
_KINDS: Any = SDPBackend
_CUDNN, _EFFICIENT = int(_KINDS.CUDNN_ATTENTION), int(_KINDS.EFFICIENT_ATTENTION)
_TORCHS = functional.scaled_dot_product_attention
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


class _Own(TorchFunctionMode):
    """Torch's attention by our kernels, in a block, where they know the case."""

    def __init__(self) -> None:
        self._kernels: dict[torch.device, ShortAttention] = {}

    def kernels_of(self, device: torch.device) -> ShortAttention:
        """Return the kernels for a GPU, which may still be being compiled."""
        if device not in self._kernels:
            self._kernels[device] = ShortAttention(device)
        return self._kernels[device]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _TORCHS:
            found = self._attended(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def _attended(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **more: Any,
    ) -> torch.Tensor | None:
        if not fits(query, key, value, attn_mask) or (is_causal and attn_mask is not None):
            return None
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        is_usual = 0 <= dropout_p < 1 and scale != 0 and math.isfinite(scale)
        kernels = self.kernels_of(query.device)
        if not is_usual or set(more) - {"enable_gqa"} or not kernels.are_there():
            return None
        wanted = Wanted(float(dropout_p), bool(is_causal), scale)
        with torch.cuda.device_of(query):  # another one may be this thread's
            return attend(kernels, (query, key, value), attn_mask, wanted)


def quick(own: Attend, device: torch.device) -> Attend:
    """Return the function with short texts attended by the faster kernels.

    Torch's own choice stands in deterministic mode, in compiled code, where the user has named
    kernels (`torch.nn.attention.sdpa_kernel`), and where a mode of somebody's looks at what torch's
    functions or operations are given, unless that says `only_looks`. (Around the forward pass of
    checkpointed blocks alone, and not around their recomputation, such a mode makes the two
    differ.) The order of kernels is one for all threads.
    """
    usual = torch._C._get_sdp_priority_order()
    first = [_EFFICIENT, *(kind for kind in usual if kind != _EFFICIENT)]
    mode = _Own()
    mode.kernels_of(device)  # they are compiled while the run makes itself ready

    @wraps(own)
    def attend(module: Any, query: Any, key: Any, value: Any, *more: Any, **by: Any) -> Any:
        if torch.compiler.is_compiling() or not is_short(query, key, value) or not _is_free(usual):
            return own(module, query, key, value, *more, **by)
        order = first if is_short(query, key, value, _MOST) else usual
        try:
            torch._C._set_sdp_priority_order(order)
            with mode:
                return own(module, query, key, value, *more, **by)
        finally:
            torch._C._set_sdp_priority_order(usual)

    return attend


def is_short(query: Any, key: Any, value: Any, most: int = MOST) -> bool:
    """Whether attention is over few enough keys, in a type that cuDNN would take."""
    if not isinstance(query, torch.Tensor) or query.is_nested or query.dim() != 4:
        return False
    if query.dtype not in _HALVES or query.device.type != "cuda":
        return False
    lengths, widths = (query.size(-2), key.size(-2)), (query.size(-1), value.size(-1))
    return bool(max(lengths) <= most and max(widths) <= _MOST)


def _is_free(usual: list[int]) -> bool:
    """Whether nobody but torch has chosen the kernels, or looks at what they are given."""
    return (
        torch._C._get_sdp_priority_order() == usual
        and all(getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in _SWITCHES)
        and not torch.are_deterministic_algorithms_enabled()
        and all(getattr(mode, "only_looks", False) for mode in _get_current_dispatch_mode_stack())
        and all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
        and not torch._C._is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
    )
