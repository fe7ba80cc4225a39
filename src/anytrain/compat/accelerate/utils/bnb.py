"""bitsandbytes' quantization: looked for, and refused by name."""

from __future__ import annotations

from torch import nn

from anytrain.compat.accelerate import refused

__all__ = ["has_4bit_bnb_layers"]

__getattr__ = refused.of(__name__, "utils.bnb")


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether the model has 4-bit layers of bitsandbytes."""
    return any(
        type(part).__name__ == "Linear4bit" and type(part).__module__.startswith("bitsandbytes")
        for part in model.modules()
    )
