"""Tell Python that tensors without data are on the fake device (a TorchFunctionMode).

`FunctionMode` sees every function of torch before it runs: it says where a tensor is, sends tensors
from device to device, makes large weights without data, and casts as autocast would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._meta_registrations  # torch's shapes of operations that C++ has none for
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._device import _device_constructors

from anytrain.insight.preflight.fake_device.backend import patched_device_module
from anytrain.insight.preflight.fake_device.device import LARGE, META, FakeDevice, flat, map_tensors
from anytrain.insight.preflight.fake_device.dispatch_mode import DispatchMode
from anytrain.insight.preflight.fake_device.kernel_choice import (
    Autocast,
    attention_on_cuda,
    install_kernel_choice,
)
from anytrain.insight.preflight.fake_device.weights import claim_parameter, truncated_normal_of_data

Tensor = torch.Tensor
_CPU = torch.device("cpu")
_NEW = {
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.rand,
    torch.randn,
    torch.normal,
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.rand_like,
    torch.randn_like,
}
_RECURRENT = {
    *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    *(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
}
"""What compares in C++ the devices of its arguments, before any operation of theirs is seen."""
_ATTENTION = nn.functional.scaled_dot_product_attention
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no(*args: Any) -> bool:
    return False


class FunctionMode(TorchFunctionMode):
    """Answer for the fake device wherever Python calls torch."""

    def __init__(self, device: FakeDevice, answers: DispatchMode) -> None:
        super().__init__()
        self.device, self.answers = device, answers
        self.autocast = Autocast(device.device.type)
        self.default: torch.device | None = None
        """The device that the script wants new tensors on."""
        self._bodies: dict[FunctionType, FunctionType] = {}
        self._inside: Any = None
        kind = device.device.type
        at = device.claim
        self._own: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: at,
            Tensor.is_meta.__get__: lambda t: at(t) == META,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda t: at(t).type == "cpu",  # type: ignore[attr-defined]
            Tensor.get_device: lambda t: -1 if at(t).index is None else at(t).index,
            Tensor.to: self._to,
            Tensor.cpu: lambda t, *_, **__: self._to(t, "cpu"),
            Tensor.cuda: lambda t, device=None, *_, **__: self._to(t, "cuda"),
            Tensor.pin_memory: lambda t, *_: t,
            Tensor.is_pinned: lambda t, *_: False,
            Tensor.tolist: self._tolist,
            Tensor.numpy: self._numpy,
            Tensor.__array__: lambda t, *a: self._numpy(t),
            Tensor.__repr__: self._repr,
            Tensor.__format__: lambda t, spec: self._repr(t),
            Tensor.data_ptr: lambda t: 0 if t.is_meta else t.data_ptr(),
        }
        for name in ("cuda", "mps", "xla"):
            getter = getattr(Tensor, f"is_{name}").__get__
            self._own[getter] = (lambda n: lambda t: at(t).type == n)(name)
        self.kind = kind

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own = self._own.get(func)
        if own is not None:
            return own(*args, **kwargs)
        if self.autocast.is_on:
            args, kwargs = self.autocast.cast(func, args, kwargs)
        if isinstance(func, FunctionType):
            return self._open(func, args, kwargs)
        func, args = self._as_claimed(func, args)
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        wanted = self.device.names(kwargs.get("device"))
        if wanted is None and self.default is not None and func in _device_constructors():
            wanted = self.default
        if wanted is None and func not in _NEW:
            return func(*args, **kwargs)
        return self._made(func, args, kwargs, wanted)

    def _as_claimed(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return what to call where C++ would ask for the device that it sees."""
        if func is _ATTENTION and torch.is_inference_mode_enabled() and self.kind == "cuda":
            return attention_on_cuda, args  # autograd's key is off there
        if func in _RECURRENT and any(tensor.is_meta for tensor in flat(args, [])):
            return func, map_tensors(self._without_data, args)
        return func, args

    def set_default(self, device: Any) -> None:
        self.default = None if device is None else self.device.names(device)

    def get_default(self) -> torch.device:
        return self.default or _CPU

    def _open(self, func: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that is written in Python, and see what it calls."""
        if self._inside is func:  # it has asked again whether somebody overrides it
            return func(*args, **kwargs)
        body = self._bodies.get(func)
        if body is None:
            world = {**func.__globals__, **dict.fromkeys(_CHECKS, _no)}
            body = FunctionType(
                func.__code__, world, func.__name__, func.__defaults__, func.__closure__
            )
            body.__kwdefaults__ = func.__kwdefaults__
            self._bodies[func] = body
        before, self._inside = self._inside, func
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self._inside = before

    def _made(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: torch.device | None
    ) -> Any:
        """Make a tensor where it was asked for, without data if it would be large."""
        if wanted is None and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return func(*args, **kwargs)  # like another one
        is_real = wanted is None or wanted.type == "cpu"
        if is_real and not (func in _NEW and _num_floats(args, kwargs) >= LARGE):
            return func(*args, **kwargs)
        if wanted is not None and wanted.type not in ("cpu", "meta", self.kind):
            return func(*args, **kwargs)
        return self._placed(func, args, {**kwargs, "device": META}, wanted or _CPU)

    def _without_data(self, tensor: Tensor) -> Tensor:
        """Return floats without data, where they were; counts of rows stay real.

        Data are real on the CPU and weights are not, which C++ takes for two devices.
        """
        if tensor.is_meta or not tensor.is_floating_point():
            return tensor
        found: Tensor = self._placed(self.device.standing_in, (tensor,), {}, tensor.device)
        return found.requires_grad_(tensor.requires_grad)

    def _placed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: torch.device
    ) -> Any:
        before, self.device.intent = self.device.intent, where
        try:
            if kwargs.get("generator") is not None:
                kwargs = {**kwargs, "generator": None}
            out = func(*args, **kwargs)
        finally:
            self.device.intent = before
        for tensor in flat(out, []):
            self.device.adopt(tensor, where)
        return out

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted, dtype, copy = self._asked(args, kwargs)
        here = self.device.claim(tensor)
        kept = {"memory_format": kwargs["memory_format"]} if "memory_format" in kwargs else {}
        if wanted is None or (wanted == here and (tensor.is_meta or here.type == "cpu")):
            return tensor.to(dtype or tensor.dtype, copy=copy, **kept)
        if wanted.type == "cpu":
            return tensor.to(_CPU, dtype or tensor.dtype, copy=copy, **kept)
        if wanted.type not in ("meta", self.kind):
            return tensor.to(wanted, dtype or tensor.dtype, copy=copy, **kept)
        given = (tensor, META, dtype or tensor.dtype)
        placed: Tensor = self._placed(Tensor.to, given, {"copy": True, **kept}, wanted)
        return placed

    def _asked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.device | None, torch.dtype | None, bool]:
        wanted: Any = kwargs.get("device")
        dtype: torch.dtype | None = kwargs.get("dtype")
        copy = bool(kwargs.get("copy", False))
        flags: list[bool] = []
        for value in (*args, *([kwargs["other"]] if "other" in kwargs else [])):
            if isinstance(value, Tensor):
                return self.device.claim(value), value.dtype, copy
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, bool):
                flags.append(value)
            elif value is not None:
                wanted = value
        return self.device.names(wanted), dtype, copy or (len(flags) > 1 and flags[1])

    # -- what the host reads ------------------------------------------------------------------

    def _read(self, tensor: Tensor, how: str) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if self.device.claim(tensor) == self.device.device:
            self.device.recorder.ran(
                torch.ops.aten._to_copy.default, (tensor,), {}, [tensor], [], how, False
            )
        return self.answers.readable(tensor)

    def _tolist(self, tensor: Tensor) -> Any:
        return self._read(tensor, "to cpu").tolist()

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_meta:
            return tensor.numpy(*args, **kwargs)
        if self.device.claim(tensor) == self.device.device and self.kind != "cpu":
            raise TypeError(
                f"can't convert {self.device.device} device type tensor to numpy. Use "
                "Tensor.cpu() to copy the tensor to host memory first."
            )
        return np.ones(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    def _repr(self, tensor: Tensor, **kwargs: Any) -> str:
        if not tensor.is_meta:
            return repr(tensor)
        self._read(tensor, "print")
        return f"tensor(..., device='{self.device.claim(tensor)}', size={tuple(tensor.shape)})"


def _num_floats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return how many elements a new float tensor would have; 0 of another dtype."""
    if args and isinstance(args[0], Tensor):
        dtype = kwargs.get("dtype") or args[0].dtype
        return args[0].numel() if dtype.is_floating_point else 0
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if not dtype.is_floating_point:
        return 0
    sizes: Any = kwargs.get("size", args)
    if sizes and isinstance(sizes[0], (list, tuple)):
        sizes = sizes[0]
    try:
        return math.prod(int(size) for size in sizes)
    except (TypeError, ValueError):
        return 0


@contextmanager
def claimed(
    device: FakeDevice, num_devices: int = 1, memory_bytes: int | None = None
) -> Iterator[FunctionMode]:
    """Let the block's torch have the device; nothing in it allocates a weight."""
    kind = device.device.type
    with ExitStack() as stack:
        stack.enter_context(patched_device_module(device.device, num_devices, memory_bytes))
        _see_groups(stack, device)
        # Who saves a tensor for backward is asked from C++, where no device is claimed.
        stack.enter_context(
            mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=_looks)
        )
        stack.enter_context(
            mock.patch.object(nn.init, "_no_grad_trunc_normal_", truncated_normal_of_data())
        )
        library = install_kernel_choice(kind)
        stack.callback(library._destroy)
        hook = module_hooks.register_module_parameter_registration_hook(claim_parameter(device))
        stack.callback(hook.remove)
        answers = DispatchMode(device)
        claims = FunctionMode(device, answers)
        for name, own in (
            ("set_default_device", claims.set_default),
            ("get_default_device", claims.get_default),
        ):
            stack.enter_context(mock.patch.object(torch, name, own))
        stack.enter_context(answers)
        yield stack.enter_context(claims)


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    """Return how a tensor looks that is computed again in backward."""
    return tensor.shape, tensor.dtype


def _see_groups(stack: ExitStack, device: FakeDevice) -> None:
    """Let optimizers and clipping, which group tensors in C++, see the fake device."""
    from torch.utils import _foreach_utils

    grouped = _foreach_utils._group_tensors_by_device_and_dtype

    def group(*args: Any, **kwargs: Any) -> Any:
        found = grouped(*args, **kwargs)
        return {
            (device.device if where == META else where, dtype): value
            for (where, dtype), value in found.items()
        }

    import torch.nn.utils.clip_grad as clipping
    import torch.optim.optimizer as optimizers

    for holder in (_foreach_utils, clipping, optimizers):
        if hasattr(holder, grouped.__name__):
            stack.enter_context(mock.patch.object(holder, grouped.__name__, group))
