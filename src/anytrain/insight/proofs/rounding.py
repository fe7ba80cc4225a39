"""Compute in float32 and round each result to a narrower format: what rounding alone does.

Products and sums are added up in float32, as the units of GPUs and TPUs do it, and every
operation's result is rounded, also where autocast would leave it whole. No kernel of the narrow
format runs, so none that is wrong can hide in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Round = Callable[[torch.Tensor], torch.Tensor]
_TF32_DROPPED = 13
"""float32 has 23 bits behind the point, TF32 has 10."""
UNITS = {"tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest share by which rounding changes a value."""


def _narrowed(dtype: torch.dtype) -> Round:
    most = torch.finfo(dtype).max

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        # Masks hold float32's least value, which would round to an infinity.
        return tensor.clamp(-most, most).to(dtype).to(tensor.dtype)

    return narrow


def _tf32(tensor: torch.Tensor) -> torch.Tensor:
    half = 1 << (_TF32_DROPPED - 1)
    bits = (tensor.contiguous().view(torch.int32) + half) & -(1 << _TF32_DROPPED)
    return torch.where(tensor.isfinite(), bits.view(torch.float32), tensor)


_ROUNDS: dict[str, Round] = {
    "tf32": _tf32,
    "float16": _narrowed(torch.float16),
    "bfloat16": _narrowed(torch.bfloat16),
}


class Rounded(TorchDispatchMode):
    """Round what every operation makes, forward and backward, to a format by its name."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._round = _ROUNDS[name]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, (tuple, list)) else (out,)
        for made, told in zip(found, func._schema.returns, strict=False):
            is_view = told.alias_info is not None and not told.alias_info.is_write
            for tensor in made if isinstance(made, (tuple, list)) else (made,):
                if not is_view:
                    self.narrow(tensor)
        return out

    def narrow(self, tensor: Any) -> None:
        """Round a tensor where it lies; what is no float32 stays."""
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32 and tensor.numel():
            with torch.no_grad():
                tensor.copy_(self._round(tensor))
