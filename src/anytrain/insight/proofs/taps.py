"""Listen at every module's inputs and outputs, forward and backward.

Two runs of the same model are compared at each tap. The second run is then given the first one's
value and gradient, so that what a module adds is seen alone, however deep it is: errors of the
modules before it do not pile up in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from anytrain.engine.tree import map_tensors

End = Literal["input", "output"]


@dataclass(frozen=True, slots=True)
class Spot:
    """One tensor that goes into a module or comes out of it, at one of the module's calls."""

    module: str
    call: int
    end: End
    index: int


@dataclass(slots=True)
class Book:
    """What was seen at each spot, in the order in which it came."""

    values: dict[Spot, torch.Tensor] = field(default_factory=dict)
    gradients: dict[Spot, torch.Tensor] = field(default_factory=dict)


class Tap(torch.autograd.Function):
    """Hand a tensor to `value` on its way forward, and its gradient to `gradient` on its way back.

    What the two return goes on in its place.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, taps: Taps, spot: Spot) -> torch.Tensor:
        """Return the value that goes on."""
        ctx.taps, ctx.spot = taps, spot
        return taps.value(spot, tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradient that goes on."""
        return ctx.taps.gradient(ctx.spot, grads[0]), None, None


class Taps:
    """The taps of one run: they note all, and give back what another run had there, if any."""

    def __init__(self, given: Book | None = None) -> None:
        self.book = Book()
        self._given = given
        self._calls: dict[str, int] = {}
        self._is_forward = True

    def value(self, spot: Spot, tensor: torch.Tensor) -> torch.Tensor:
        """Note a value; return what takes its place."""
        self.book.values[spot] = _noted(tensor)
        return self._instead(tensor, None if self._given is None else self._given.values.get(spot))

    def gradient(self, spot: Spot, grad: torch.Tensor) -> torch.Tensor:
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
        """Run backward; blocks that are computed again in it are not listened to."""
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
            spot = Spot(name, call, end, next(count))
            found: torch.Tensor = Tap.apply(tensor, self, spot)  # type: ignore[no-untyped-call]
            return found

        return tap


def _noted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host in float32."""
    return tensor.detach().to("cpu", torch.float32, copy=True)
