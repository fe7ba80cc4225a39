"""Numbers that a step writes down, made on the device: a recording cannot copy from the host.

Code that models run at every step is full of `torch.tensor(0.0, device=...)`, and some of
`torch.tensor(127).type_as(positions)`, often in functions that torch has scripted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._device import _device_constructors

from anytrain.core import patches

_device_constructors()  # torch keeps this list once it is made: no stand-in must be in it
_UNUSUAL = {"copy", "other"}
"""What torch's own reading of `to` does not know."""


class _Number(torch.Tensor):
    """A number on the host, which is made anew where it is sent to a device."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make it on the device, if that is asked for; else it is a tensor like all others."""
        kwargs, first = kwargs or {}, args[0] if args else None
        name = getattr(func, "__name__", "")
        if isinstance(first, _Number) and name in ("to", "type_as") and not {*kwargs} & _UNUSUAL:
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
            if device is not None and device.type != "cpu":
                value, own = first.item(), first.dtype
                return torch.full((), value, dtype=dtype or own, device=device)
        if len(types) > 1:  # others have their own ways with plain tensors
            args, kwargs = _pytree.tree_map_only(_Number, _plain, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _plain(number: _Number) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return number.as_subclass(torch.Tensor)


@contextmanager
def numbers_on_device() -> Iterator[None]:
    """Make tensors of single numbers on the device, at once or when they are sent there."""

    def instead_of(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> torch.Tensor:
            if more or type(data) not in (bool, int, float) or torch.compiler.is_compiling():
                return make(data, dtype=dtype, device=device, **more)
            if device is not None:
                return torch.full((), data, dtype=dtype, device=device)
            found = make(data, dtype=dtype)
            return found.as_subclass(_Number) if found.device.type == "cpu" else found

        return made

    makers = {"tensor": instead_of(torch.tensor), "as_tensor": instead_of(torch.as_tensor)}
    with patches.replaced("numbers", torch, **makers):
        yield


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Call functions of the model's files as they are written, where torch has scripted them."""
    files = {type(module).__module__ for module in model.modules()}
    with ExitStack() as put_back:
        for name in files & sys.modules.keys():
            for called, function in list(vars(sys.modules[name]).items()):
                plain = _written(function)
                if plain is not None:
                    change = patches.replaced(
                        "scripted functions", sys.modules[name], **{called: plain}
                    )
                    put_back.enter_context(change)
        yield


def _written(function: Any) -> Any:
    """Return what a scripted function was made of; None of others, and where the two may differ."""
    if not isinstance(function, torch.jit.ScriptFunction):
        return None
    if getattr(function, "__name__", "") != "ScriptFunction":  # traced: what it ran, not the code
        return None
    plain = getattr(function, "_torchdynamo_inline", None)
    names = getattr(getattr(plain, "__code__", None), "co_names", ("is_scripting",))
    return None if "is_scripting" in names else plain
