"""torchao's fp8 layers: none here; converting to them is refused by name."""

from __future__ import annotations

from torch import nn

from anytrain.compat.accelerate import refused

__all__ = ["has_ao_layers"]

__getattr__ = refused.of(__name__, "utils.ao")


def has_ao_layers(model: nn.Module) -> bool:
    """Whether the model has layers of torchao's fp8 training."""
    return any(type(part).__module__.startswith("torchao.float8") for part in model.modules())
