"""Refuse to fork a process whose copies could not work, and say what stands in the way."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from anytrain.core.errors import Unsupported, WrongOrder
from anytrain.core.notices import give_notice

_FRESH = "leave start_method out: fresh processes need no untouched notebook. Or restart the kernel"


def check(function: Callable[..., Any], args: tuple[Any, ...], backend: str) -> None:
    """Refuse a fork after a device was used or a run begun; tell what it costs on a CPU."""
    if not hasattr(os, "fork"):
        raise Unsupported(
            "Cannot fork on this system.",
            why=f"{sys.platform} has no fork.",
            fix="leave start_method out for fresh processes.",
        )
    touched = _touched()
    if touched is not None:
        device, what = touched
        held = ", ".join(f"`{name}`" for name in _on_devices(function, args))
        raise WrongOrder(
            "Cannot fork this process.",
            why=f"{what}, and {device} does not survive a fork."
            + (f" These live there: {held}." if held else ""),
            fix=f"{_FRESH} and touch no device before the launch.",
        )
    _check_session()
    import torch

    if backend == "cpu" and torch.get_num_threads() > 1:
        give_notice(
            "Forked processes compute with one thread each: the threads of this process "
            f"({torch.get_num_threads()}) do not come along, and OpenMP would wait for them. "
            "Fresh processes share the cores.",
            stacklevel=3,
        )


def _touched() -> tuple[str, str] | None:
    """Return the device runtime that lives in this process, and what started it."""
    from anytrain.machine.backends import cuda

    if cuda.is_started():
        return "CUDA", "a GPU has been used here"
    if "torch_xla" in sys.modules:
        return "its runtime", "torch_xla has been imported here"
    if "torch_tpu" in sys.modules and _tpu_is_started():
        return "its runtime", "torch_tpu (loaded by `import torch`) has started the TPU here"
    return None


def _tpu_is_started() -> bool:
    import torch

    try:
        return bool(torch.get_device_module("tpu").is_initialized())
    except (AttributeError, RuntimeError):
        return True  # it does not say: a fork that hangs is worse than a refusal


def _check_session() -> None:
    """Refuse copies of a run: each would believe that it is alone."""
    current = sys.modules.get("anytrain.engine.assemble.current")
    if current is not None and current.get() is not None:
        raise WrongOrder(
            "Cannot fork this process.",
            why="an Accelerator or Trainer was made in it, and each copy would take over its "
            "world of one process.",
            fix="leave start_method out for fresh processes; or restart this one, and make it "
            "inside the function that is launched.",
        )


def _on_devices(function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[str]:
    """Name the variables whose tensors live on a device."""
    for number, thing in enumerate(args):
        if _is_on_device(thing):
            yield f"args[{number}]"
    for name, thing in list(getattr(function, "__globals__", {}).items()):
        if not name.startswith("_") and _is_on_device(thing):
            yield name


def _is_on_device(thing: Any) -> bool:
    import torch

    if isinstance(thing, torch.nn.Module):
        thing = next(thing.parameters(), None)
    return isinstance(thing, torch.Tensor) and thing.device.type not in ("cpu", "meta")
