"""Call what a subclass has overridden in the form it has: older scripts take fewer arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any


def call(method: Callable[..., Any], *given: Any) -> Any:
    """Call a method with as many of the values as it takes by place, the first ones first.

    >>> call(lambda logs: logs, {"loss": 1.0}, 12.5)
    {'loss': 1.0}
    """
    return method(*given[: num_places(method)])


def call_by_name(method: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a method with those of the values that it has a name for, or all by place.

    >>> call_by_name(lambda model, loss: (model, loss), {"loss": 1, "norm": 2, "model": 3})
    (3, 1)
    """
    takes = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in takes):
        return method(*given.values())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in takes)
    names = {p.name for p in takes}
    return method(**{n: value for n, value in given.items() if takes_any or n in names})


def num_places(method: Callable[..., Any]) -> int | None:
    """Return how many values a function takes by place; None where any number.

    >>> num_places(lambda model, inputs: 0), num_places(lambda *args: 0)
    (2, None)
    """
    own = getattr(method, "__func__", method)
    bound = own is not method
    try:
        places = _places(own)
    except TypeError:  # an object that cannot be a key
        places = _places.__wrapped__(own)
    return None if places is None else places - bound


@lru_cache(maxsize=64)  # asked at every step, and a signature takes 20 us to read
def _places(function: Callable[..., Any]) -> int | None:
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:  # compiled: nobody can look into it
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in found):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found)
