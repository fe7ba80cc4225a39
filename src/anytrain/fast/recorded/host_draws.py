"""Numbers that a step draws on the host, and that decide nothing.

Many models draw one for each layer and leave the layer out where it is below a rate (LayerDrop);
the rate is 0 in most of their configurations, but they draw all the same. No number from [0, 1) is
below 0, so a recording holds for all of them. Its replays draw as many, so that whoever draws next
gets what it would get if the step had run op by op.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils import _pytree
from torch.utils._device import _device_constructors

from anytrain.core import patches

_device_constructors()  # torch keeps this list once it is made: no stand-in must be in it
_SINGLE = ((), (1,))
"""The shapes of one number."""
_CERTAIN: dict[str, Callable[[float], bool]] = {
    "lt": lambda bound: bound <= 0 or bound >= 1,
    "le": lambda bound: bound < 0 or bound >= 1,
    "gt": lambda bound: bound < 0 or bound >= 1,
    "ge": lambda bound: bound <= 0 or bound >= 1,
}
"""Whether a comparison with a bound comes out the same for all of [0, 1)."""


@dataclass(slots=True)
class HostDraws:
    """How many such numbers were drawn."""

    number: int = 0
    decide: bool = False
    """Whether anything may depend on one of them."""
    made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def draw(self) -> None:
        """Draw as many on the host."""
        for _ in range(self.number):
            torch.rand((), device="cpu")

    def explain(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether nothing else has moved the host's generator from one state to another.

        Where it has not moved, or somebody still holds a number, they are no such numbers.
        """
        if torch.equal(before, after):
            self.number = 0
            return True
        if self.decide or any(chance() is not None for chance in self.made):
            return False
        twin = torch.Generator("cpu")
        twin.set_state(before)
        for _ in range(self.number):
            torch.rand((), generator=twin, device="cpu")
        return torch.equal(twin.get_state(), after)


class _Chance(torch.Tensor):
    """A number from [0, 1), which tells when its value matters."""

    chances: HostDraws
    plain: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compare it where the outcome is certain; note whatever else is done with it."""
        return _called(func, args, kwargs or {}, is_certain=_is_certain(func, args))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note what reads it below Python: as a number among a function's settings, say."""
        return _called(func, args, kwargs or {}, is_certain=False)


def _called(func: Any, args: Any, kwargs: Any, *, is_certain: bool) -> Any:
    def plain(chance: _Chance) -> torch.Tensor:
        known = vars(chance)
        known["chances"].decide |= not is_certain
        found: torch.Tensor = known["plain"]
        return found

    args, kwargs = _pytree.tree_map_only(_Chance, plain, (args, kwargs))
    return func(*args, **kwargs)


def _is_certain(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether all numbers from [0, 1) give the same."""
    is_certain = _CERTAIN.get(getattr(func, "__name__", "").strip("_"))
    bound = args[1] if len(args) == 2 else None
    return is_certain is not None and isinstance(bound, (int, float)) and is_certain(bound)


@contextmanager
def noted() -> Iterator[HostDraws]:
    """Note in the block which numbers are drawn one by one, and whether they decide anything."""
    chances, own, thread = HostDraws(), torch.rand, threading.get_ident()

    def rand(*size: Any, **more: Any) -> torch.Tensor:
        made: torch.Tensor = own(*size, **more)
        if torch.compiler.is_compiling() or more or threading.get_ident() != thread:
            return made
        if type(made) is not torch.Tensor or made.device.type != "cpu" or made.shape not in _SINGLE:
            return made
        chance: Any = torch.Tensor._make_subclass(_Chance, made)
        vars(chance).update(chances=chances, plain=made)
        chances.number += 1
        chances.made.append(weakref.ref(chance))
        return cast(torch.Tensor, chance)

    with patches.replaced("host draws", torch, rand=rand):
        yield chances
