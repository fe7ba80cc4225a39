"""Weights without data: parameters that modules are given, and files that are not read.

Only safetensors has a header that tells names, shapes and dtypes. Other formats are read as they
are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from anytrain.engine.checkpoint.tensors import DTYPES
from anytrain.insight.preflight.fake_device.device import LARGE, META, FakeDevice

_CPU = torch.device("cpu")
_SMALL = 2**12
"""Elements below which a tensor is read."""


class _Slice:
    """A tensor of a file, of which nothing was read."""

    def __init__(self, name: str, given: Any, file: Any) -> None:
        self._name, self._given, self._file = name, given, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def whole(self) -> torch.Tensor:
        """Return it: a small one as it is, another without data."""
        shape, dtype = self._given.get_shape(), DTYPES.get(self._given.get_dtype())
        if dtype is None or not dtype.is_floating_point or math.prod(shape) < _SMALL:
            found: torch.Tensor = self._file.get_tensor(self._name)
            return found
        return torch.empty(LARGE, dtype=dtype).new_empty(shape)  # like one without data

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.whole()[index]


class _File:
    """A file of weights with the face of safetensors' own."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(name, self._file.get_slice(name), self._file)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name).whole()


@contextmanager
def weights_unread() -> Iterator[None]:
    """Let the block open files of weights without reading them."""
    try:
        import safetensors
        import safetensors.torch as files
    except ImportError:
        yield
        return
    open_file = safetensors.safe_open

    def safe_open(filename: Any, framework: str = "pt", *args: Any, **kwargs: Any) -> Any:
        if framework not in ("pt", "torch", "pytorch"):
            return open_file(filename, framework, *args, **kwargs)
        return _File(open_file(filename, framework))

    def load_file(filename: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        with safe_open(filename) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(safetensors, "safe_open", safe_open))
        for name, own in (("safe_open", safe_open), ("load_file", load_file)):
            if hasattr(files, name):
                stack.enter_context(mock.patch.object(files, name, own))
        yield


# -- parameters -----------------------------------------------------------------------------------


def claim_parameter(device: FakeDevice) -> Callable[[nn.Module, str, Any], Any]:
    """Return the hook that takes the data from every parameter that a module is given."""

    def hook(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or type(parameter) is not nn.Parameter:
            return None
        return _without_data(device, parameter)  # None: the very same one is a tied weight

    return hook


def _without_data(device: FakeDevice, parameter: nn.Parameter) -> nn.Parameter | None:
    """Return the parameter without data, claimed on the CPU; None where it has none already."""
    with torch._C.DisableTorchFunction():
        if parameter.is_meta:
            return None
        before, device.intent = device.intent, _CPU
        data = parameter.detach().to(META)
        device.intent = before
        device.adopt(data, _CPU)
        return nn.Parameter(data, parameter.requires_grad)


def claim_weights(model: nn.Module, device: FakeDevice) -> dict[int, nn.Parameter]:
    """Take the data from a model that was made before; return its new parameters by old id."""
    found: dict[int, nn.Parameter] = {}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or type(parameter) is not nn.Parameter:
                continue
            old = id(parameter)
            new = found[old] if old in found else _without_data(device, parameter)
            if new is not None:
                found[old] = owner._parameters[name] = new
    return found


def truncated_normal_of_data() -> Callable[..., torch.Tensor]:
    """Return torch's truncated normal, which draws until the values are right; without any, never.

    It asks a tensor itself whether it has data, and is told that it has.
    """
    draw = nn.init._no_grad_trunc_normal_

    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            has_data = not tensor.is_meta
        return draw(tensor, *args, **kwargs) if has_data else tensor

    return drawn
