"""Transformer Engine's layers: looked for; converting to them is refused by name."""

from __future__ import annotations

from torch import nn

from anytrain.compat.accelerate import refused

__all__ = ["has_transformer_engine_layers"]

__getattr__ = refused.of(__name__, "utils.transformer_engine")


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether the model has layers of Transformer Engine."""
    return any(type(part).__module__.startswith("transformer_engine") for part in model.modules())
