"""Make models without weights, and load them; spreading a model over devices is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.utils.environment import parse_flag_from_env
from anytrain.compat.accelerate.utils.modeling import load_checkpoint_in_model

__all__ = ["init_empty_weights", "init_on_device", "load_checkpoint_and_dispatch"]

__getattr__ = refused.module_getattr(__name__)


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Give models made in the block parameters that have shapes and no values."""
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(
    device: torch.device | str, include_buffers: bool | None = None
) -> Iterator[None]:
    """Make models of the block with their parameters on the device; buffers too, if asked."""
    device = torch.device(device)
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    if include_buffers:
        with device:
            yield
        return

    def place(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.device == device:
            return parameter
        placed = type(parameter)(parameter.detach().to(device), parameter.requires_grad)
        placed.__dict__.update(parameter.__dict__)
        return placed

    hook = register_module_parameter_registration_hook(place)
    try:
        yield
    finally:
        hook.remove()


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Any = None,
    max_memory: Any = None,
    no_split_module_classes: Any = None,
    offload_folder: Any = None,
    offload_buffers: bool = False,
    dtype: Any = None,
    offload_state_dict: bool | None = None,
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load weights into the model and return it; a `device_map` over several devices is refused."""
    if isinstance(device_map, str):
        raise refused.refusal("device_map", refused.names("big_modeling")["dispatch_model"])
    load_checkpoint_in_model(model, checkpoint, device_map=device_map, dtype=dtype, strict=strict)
    return model
