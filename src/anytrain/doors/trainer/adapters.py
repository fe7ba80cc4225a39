"""Adapters (PEFT, LoRA): what is trained beside a frozen model, saved and loaded alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def has_adapters(model: nn.Module) -> bool:
    """Whether the model is a frozen one with trained adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def inner(model: nn.Module) -> nn.Module:
    """Return the model that adapters were put into; the model itself where there are none."""
    found: Any = model
    if hasattr(found, "get_base_model"):
        base: nn.Module = found.get_base_model()
        return base
    return model


def save(model: Any, folder: str) -> None:
    """Write the adapters alone."""
    model.save_pretrained(folder)


def load(model: Any, folder: str) -> None:
    """Read the adapters that `save` wrote."""
    from peft import load_peft_weights, set_peft_model_state_dict

    for name in model.peft_config:
        # PEFT's layout: the adapter "default" lies in the folder, another in one of its name.
        where = folder if name == "default" else str(Path(folder) / name)
        weights = load_peft_weights(where, device="cpu")
        set_peft_model_state_dict(model, weights, adapter_name=name)
