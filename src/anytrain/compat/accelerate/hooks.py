"""Hooks that move weights around a forward: taken off where there are some, refused otherwise."""

from __future__ import annotations

from typing import Any

from torch import nn

from anytrain.compat.accelerate import refused

__all__ = ["remove_hook_from_module", "remove_hook_from_submodules"]

__getattr__ = refused.module_getattr(__name__)

# What HF puts on a spread model, in place of its methods, to say that it cannot be moved.
_accelerate_added_attributes = ["to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"]


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take off what a loader with a device_map has put around the module's forward."""
    hooked: Any = module
    if "_hf_hook" in module.__dict__:
        hooked._hf_hook.detach_hook(module)
        del hooked._hf_hook
    if "_old_forward" in module.__dict__:
        hooked.forward = module.__dict__.pop("_old_forward")
    for name in _accelerate_added_attributes:
        module.__dict__.pop(name, None)
    for child in module.children() if recurse else ():
        remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take such hooks off the module and everything in it."""
    remove_hook_from_module(module, recurse=True)
