"""Compute in the planned precision: autocast around the forward, a scale around the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anytrain.engine.tree import map_tensors

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LossScale:
    """fp16's loss scale, with the value that the last backward used.

    The scale adapts after an update; another optimizer's gradients may still wait in the old one.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self.used: torch.Tensor | None = None

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale."""
        scaled: torch.Tensor = self.scaler.scale(loss)
        if self.scaler._scale is not None:
            self.used = self.scaler._scale.clone()
        return scaled


@dataclass(frozen=True, slots=True)
class Precision:
    """How one session computes."""

    name: str
    device_type: str
    scale: LossScale | None = None
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
    scale = None
    if name == "fp16":
        scale = LossScale(torch.amp.GradScaler(device_type, **(scaler_options or {})))
    return Precision(name, device_type, scale, autocast_options)


def lower(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Round a model's weights and buffers to `dtype`; return what gives back the very ones.

    They wait on the host, so that the device has the room.
    """
    held = [
        (tensor, tensor.device, tensor.detach().cpu())
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.is_floating_point() and tensor.dtype != dtype
    ]
    for tensor, _, _ in held:
        tensor.data = tensor.data.to(dtype)

    def give_back() -> None:
        for tensor, device, whole in held:
            tensor.data = whole.to(device)

    return give_back


def to_float32(tree: Any) -> Any:
    """Return the tree with half-precision tensors widened, so that losses add up exactly."""
    return map_tensors(_widen, tree)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
