"""Listen at every module's inputs and outputs, forward and backward.

Two runs of the same model are compared at each tap. The second run is then given the first one's
value and gradient, so that what a module adds is seen alone, however deep it is: errors of the
modules before it do not pile up in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from anytrain.engine.tree import map_tensors

End = Literal["input", "output"]
_LEAST = 1e-3
"""Gradients below this share of the model's largest are held against that share."""


@dataclass(frozen=True, slots=True)
class TapPoint:
    """One tensor that goes into a module or comes out of it, at one of the module's calls."""

    module: str
    call: int
    end: End
    index: int


@dataclass(slots=True)
class TapValues:
    """What was seen at each spot, in the order in which it came."""

    values: dict[TapPoint, torch.Tensor] = field(default_factory=dict)
    gradients: dict[TapPoint, torch.Tensor] = field(default_factory=dict)


class Tap(torch.autograd.Function):
    """Hand a tensor to `value` on its way forward, and its gradient to `gradient` on its way back.

    What the two return goes on in its place.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, taps: Taps, spot: TapPoint) -> torch.Tensor:
        ctx.taps, ctx.spot = taps, spot
        return taps.value(spot, tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.taps.gradient(ctx.spot, grads[0]), None, None


class Taps:
    """The taps of one run: they note all, and give back what another run had there, if any."""

    def __init__(self, given: TapValues | None = None) -> None:
        self.book = TapValues()
        self._given = given
        self._calls: dict[str, int] = {}
        self._is_forward = True

    def value(self, spot: TapPoint, tensor: torch.Tensor) -> torch.Tensor:
        """Note a value; return what takes its place."""
        self.book.values[spot] = _noted(tensor)
        return self._instead(tensor, None if self._given is None else self._given.values.get(spot))

    def gradient(self, spot: TapPoint, grad: torch.Tensor) -> torch.Tensor:
        """Note a gradient; return what takes its place."""
        self.book.gradients[spot] = _noted(grad)
        given = None if self._given is None else self._given.gradients.get(spot)
        return self._instead(grad, given)

    @staticmethod
    def _instead(own: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        if given is None or given.shape != own.shape:
            return own.clone()
        return given.to(own.device, own.dtype, copy=True)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Listen at every module of the model while the block runs."""
        removed: list[Any] = []
        for name, module in model.named_modules():
            before, after = self._hooks(name)
            removed.append(module.register_forward_pre_hook(before, with_kwargs=True))
            removed.append(module.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in removed:
                handle.remove()

    def backward(self, loss: torch.Tensor) -> None:
        self._is_forward = False
        loss.backward()

    def _hooks(self, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        open_calls: list[int] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self._is_forward:
                return None
            call = self._calls[name] = self._calls.get(name, 0) + 1
            open_calls.append(call)
            tap = self._tapping(name, call, "input")
            return map_tensors(tap, args), map_tensors(tap, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if not self._is_forward:
                return None
            return map_tensors(self._tapping(name, open_calls.pop(), "output"), output)

        return before, after

    def _tapping(self, name: str, call: int, end: End) -> Callable[[torch.Tensor], torch.Tensor]:
        count = iter(range(1 << 30))

        def tap(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or tensor.layout is not torch.strided:
                return tensor
            spot = TapPoint(name, call, end, next(count))
            found: torch.Tensor = Tap.apply(tensor, self, spot)  # type: ignore[no-untyped-call]
            return found

        return tap


def _noted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


# -- how far apart two runs are -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measure:
    """How far one tensor is off."""

    module: str
    """The path of the module that made it; empty for the model itself."""
    kind: str
    """That module's class."""
    what: str
    """Which tensor: "its output", "the gradient of its input"."""
    error: float
    """The largest difference as a share of the largest value; infinite for NaN."""
    is_gradient: bool

    @property
    def group(self) -> str:
        """A name that the same tensor of repeated blocks shares.

        >>> Measure("layer.3.query", "Linear", "its output", 0.0, False).group
        'layer.*.query its output'
        """
        return re.sub(r"\b\d+\b", "*", f"{self.module} {self.what}")


class Measures:
    """One run, to hold others against."""

    def __init__(self, model: nn.Module, book: TapValues) -> None:
        self._model, self.book = model, book
        self._kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        self._largest = max((_size(g) for g in book.gradients.values()), default=0.0)

    def against(self, model: nn.Module, book: TapValues) -> Iterator[Measure]:
        """Yield how far each tensor of another run is off, forward first."""
        floor = self._largest * _LEAST
        for spot, value in book.values.items():
            if spot in self.book.values and (spot.module or spot.end == "output"):
                yield from self._measure(*_value_in_words(spot), value, self.book.values[spot])
        for spot, grad in book.gradients.items():
            if spot in self.book.gradients:
                other = self.book.gradients[spot]
                yield from self._measure(*_gradient_in_words(spot), grad, other, floor)
        for name, what, own, other, least in _of_parameters(self._model, model):
            yield from self._measure(name, what, own, other, max(least, floor))

    def _measure(
        self, module: str, what: str, own: torch.Tensor, other: torch.Tensor, floor: float = 0.0
    ) -> Iterator[Measure]:
        error = _error(own, other, floor)
        if error is not None:
            kind = self._kinds.get(module, "module")
            yield Measure(module, kind, what, error, "gradient" in what)


def unlike_calls(taken: TapValues, found: TapValues) -> list[str]:
    """Return the modules that one run calls more often than the other."""
    calls = [{(s.module, s.call) for s in book.values} for book in (taken, found)]
    return sorted({name or "the model" for name, _ in calls[0] ^ calls[1]})


def _error(own: torch.Tensor, other: torch.Tensor, floor: float) -> float | None:
    """Return the largest difference as a share of the largest value; None if none compares."""
    if own.shape != other.shape:
        return math.inf
    told = other.isfinite() & (other.abs() < torch.finfo(torch.float16).max)  # no masks' -inf
    if not bool(told.any()):
        return None
    own, other = own[told], other[told]
    if not bool(own.isfinite().all()):
        return math.inf
    difference = float((own - other).abs().max())
    largest = max(float(other.abs().max()), floor)
    return difference / largest if largest else (math.inf if difference else 0.0)


def _of_parameters(
    reference: nn.Module, subject: nn.Module
) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor, float]]:
    """Yield both gradients of each parameter, the last module's first.

    A bias whose gradient is zero but for rounding is held against its module's weight.
    """
    other_modules = dict(reference.named_modules())
    for name, module in reversed(list(subject.named_modules())):
        pairs = [
            (key, own.grad, other_modules[name]._parameters[key].grad)
            for key, own in module._parameters.items()
            if own is not None and own.grad is not None
        ]
        known = [(k, a, b) for k, a, b in pairs if b is not None]
        floor = max([_size(b) for _, _, b in known], default=0.0)
        for key, own, other in known:
            wide = own.detach().to("cpu", torch.float32)
            yield name, f"the gradient of its {key}", wide, other.detach(), floor


def _size(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _value_in_words(spot: TapPoint) -> tuple[str, str]:
    if spot.end == "output":
        return spot.module, "its output"
    # What goes into a module was computed between modules, by the one that calls it.
    return spot.module.rpartition(".")[0], f"what it gives to {spot.module}"


def _gradient_in_words(spot: TapPoint) -> tuple[str, str]:
    if spot.end == "input":
        return spot.module, "the gradient of its input"
    # What comes back to a module's output was computed by whoever used it.
    parent = spot.module.rpartition(".")[0]
    if not spot.module:
        return "", "the gradient of its output, by the loss function"
    return parent, f"the gradient of what it makes of {spot.module}'s output"
