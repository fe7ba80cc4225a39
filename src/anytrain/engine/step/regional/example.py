"""What a block was called with, without the values: enough to call it so again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, str, torch.dtype)


class CannotTell(Exception):
    """A call has arguments that cannot be made up."""


@dataclass(frozen=True, slots=True)
class TensorLike:
    """A tensor's properties."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_grad: bool
    on_host: bool

    @property
    def kind(self) -> Hashable:
        """What stays the same when a batch has other sizes."""
        return (len(self.shape), self.dtype, self.is_grad, self.on_host)

    def make(self, device: torch.device) -> torch.Tensor:
        """Return a tensor like it: floats are drawn, whole numbers are 0, flags are set."""
        place = torch.device("cpu") if self.on_host else device
        length = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        if 0 in self.shape:
            flat = torch.empty(0, dtype=self.dtype, device=place)
        elif self.dtype.is_floating_point:
            flat = torch.randn(length, device=place).to(self.dtype)
        else:
            fill = 1 if self.dtype is torch.bool else 0
            flat = torch.full((length,), fill, dtype=self.dtype, device=place)
        # No view of `flat`: compiled code would look for the tensor behind it at every call.
        made = torch.empty(0, dtype=self.dtype, device=place)
        made.set_(flat.untyped_storage(), 0, self.shape, self.stride)
        return made.requires_grad_(self.is_grad)


@dataclass(frozen=True, slots=True)
class Example:
    """One call: its arguments, and the precision that it was made in."""

    args: Any
    kwargs: Any
    device_type: str
    autocast: torch.dtype | None

    @property
    def kind(self) -> Hashable:
        """What calls must have in common to share compiled code of any sizes."""
        return (_kind(self.args), _kind(self.kwargs), self.device_type, self.autocast)

    def make(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments like the call's."""
        args = _map(self.args, lambda like: like.make(device))
        kwargs = _map(self.kwargs, lambda like: like.make(device))
        return tuple(args), kwargs

    def precision(self) -> AbstractContextManager[Any]:
        """Return the precision to enter."""
        return torch.autocast(
            self.device_type, dtype=self.autocast, enabled=self.autocast is not None
        )


def note(args: Any, kwargs: Any, device: torch.device) -> Example:
    """Return a call's example; raise CannotTell where it has arguments of other kinds."""
    kind = device.type
    enabled = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if enabled else None
    return Example(_look(tuple(args), device), _look(dict(kwargs), device), kind, dtype)


def _look(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, torch.Tensor):
        if type(tree) is not torch.Tensor or tree.layout is not torch.strided:
            raise CannotTell(f"it is given a {type(tree).__name__} that is no plain tensor")
        host = tree.device.type == "cpu" != device.type
        return TensorLike(
            tuple(tree.shape), tree.stride(), tree.dtype, tree.requires_grad, on_host=host
        )
    if isinstance(tree, _PLAIN):
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(_look(each, device) for each in tree)
    if type(tree) is dict:
        return {name: _look(each, device) for name, each in tree.items()}
    raise CannotTell(f"it is given a {type(tree).__name__}")


def _map(tree: Any, make: Callable[[TensorLike], torch.Tensor]) -> Any:
    if isinstance(tree, TensorLike):
        return make(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(each, make) for each in tree)
    if isinstance(tree, Mapping):
        return {name: _map(each, make) for name, each in tree.items()}
    return tree


def _kind(tree: Any) -> Hashable:
    if isinstance(tree, TensorLike):
        return tree.kind
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, *map(_kind, tree))
    if isinstance(tree, Mapping):
        return tuple((name, _kind(each)) for name, each in tree.items())
    return (type(tree).__name__, tree)
