"""Compute in the planned precision: autocast around the forward, a scale around the loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from anytrain.engine.tree import map_tensors

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """How one session computes."""

    name: str
    device_type: str
    scaler: torch.amp.GradScaler | None = None
    autocast_options: Mapping[str, Any] | None = None

    def autocast(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
        """Return the context that the forward pass runs in."""
        dtype = _DTYPES.get(self.name)
        if dtype is None:
            return nullcontext()
        return torch.autocast(
            self.device_type, dtype=dtype, **{**(self.autocast_options or {}), **(options or {})}
        )

    @property
    def is_mixed(self) -> bool:
        """Whether the forward pass needs the context at all."""
        return self.name in _DTYPES


def build(
    name: str,
    device_type: str,
    *,
    scaler_options: Mapping[str, Any] | None = None,
    autocast_options: Mapping[str, Any] | None = None,
) -> Precision:
    """Return the precision; fp16 comes with a loss scale that is kept on the device."""
    scaler = torch.amp.GradScaler(device_type, **(scaler_options or {})) if name == "fp16" else None
    return Precision(name, device_type, scaler, autocast_options)


def to_float32(tree: Any) -> Any:
    """Return the tree with half-precision tensors widened, so that losses add up exactly."""
    return map_tensors(_widen, tree)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
