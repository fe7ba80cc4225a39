"""Numbers that a step draws on the host, and that decide nothing.

Many models draw one for each layer and leave the layer out where it is below a rate (LayerDrop);
the rate is 0 in most of their configurations, but they draw all the same. No number from [0, 1) is
below 0, so a recording holds for all of them. Its replays draw as many, so that whoever draws next
gets what it would get if the step had run op by op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_SINGLE = ((), (1,))
"""The shapes of one number."""
_AT_ENDS: dict[str, Callable[[float], bool | None]] = {
    "lt": lambda bound: False if bound <= 0 else True if bound >= 1 else None,
    "le": lambda bound: False if bound < 0 else True if bound >= 1 else None,
    "gt": lambda bound: True if bound < 0 else False if bound >= 1 else None,
    "ge": lambda bound: True if bound <= 0 else False if bound >= 1 else None,
}
"""What comes out of a comparison with a bound, where that is the same for all of [0, 1)."""


@dataclass(slots=True)
class Chances:
    """How many such numbers were drawn."""

    number: int = 0
    decide: bool = False
    """Whether anything may depend on one of them."""

    def draw(self) -> None:
        """Draw as many on the host."""
        for _ in range(self.number):
            torch.rand((), device="cpu")

    def explain(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether nothing else has moved the host's generator from one state to another."""
        if self.decide or not self.number:
            return False
        twin = torch.Generator("cpu")
        twin.set_state(before)
        for _ in range(self.number):
            torch.rand((), generator=twin, device="cpu")
        return torch.equal(twin.get_state(), after)


_current: Chances | None = None
"""What is noted in the block at hand."""


class _Chance(torch.Tensor):
    """A number from [0, 1), which tells when its value matters."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compare it where the outcome is certain; note whatever else is done with it."""
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if _current is not None and not _is_certain(func, args):
            _current.decide = True
        return found


def _is_certain(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether all numbers from [0, 1) give the same."""
    compare = _AT_ENDS.get(getattr(func, "__name__", "").strip("_"))
    bound = args[1] if compare is not None and len(args) == 2 else None
    if compare is None or not isinstance(bound, (int, float)) or math.isnan(bound):
        return False
    return compare(bound) is not None


@contextmanager
def noted() -> Iterator[Chances]:
    """Note in the block which numbers are drawn one by one, and whether they decide anything."""
    global _current
    before, chances, own = _current, Chances(), torch.rand

    def rand(*size: Any, **more: Any) -> torch.Tensor:
        made: torch.Tensor = own(*size, **more)
        if more or made.device.type != "cpu" or tuple(made.shape) not in _SINGLE:
            return made
        chances.number += 1
        return made.as_subclass(_Chance)

    torch.rand, _current = rand, chances
    try:
        yield chances
    finally:
        torch.rand, _current = own, before
