"""Name what in a call cannot travel to another process: the variable, not only its type."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anytrain.core import bytecode
from anytrain.machine.processes import handover

_DEEPEST = 6
_MOST_MEMBERS = 1000


def name(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """Return words for the first thing that cannot be pickled; None where none is found alone."""
    for words, path, thing in _candidates(function, args):
        if not _travels(thing):
            inner, found = _deepest(path, thing)
            return f"{words} `{inner}` (a {_kind(found)})"
    return None


def name_within(thing: Any, path: str) -> str:
    """Return words for what in a thing that cannot be pickled is to blame."""
    inner, found = _deepest(path, thing)
    return f"`{inner}` (a {_kind(found)})"


def _candidates(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> Iterator[tuple[str, str, Any]]:
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    for number, thing in enumerate(args):
        yield "the argument", names[number] if number < len(names) else f"args[{number}]", thing
    for path, thing in _captured(function, set()):
        yield "the variable", path, thing


def _captured(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the variables around a function, and those around the functions among them."""
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    known = function.__globals__
    around = bytecode.enclosed(function)
    around |= {name: known[name] for name in bytecode.names(function) if name in known}
    for thing in around.values():
        if isinstance(thing, types.FunctionType):
            yield from _captured(thing, seen)
    for variable, thing in around.items():
        if not isinstance(thing, (types.FunctionType, types.ModuleType)):
            yield variable, thing


def _deepest(path: str, thing: Any) -> tuple[str, Any]:
    """Follow what cannot be pickled inwards, as far as one member alone is to blame."""
    for _ in range(_DEEPEST):
        if type(thing).__module__.startswith("multiprocessing"):
            break  # a queue is known to people, its semaphores are not
        for part, member in _members(thing):
            if not _travels(member):
                path, thing = path + part, member
                break
        else:
            break
    return path, thing


def _members(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        pairs = list(thing.items())[:_MOST_MEMBERS]
        yield from ((f"[{key!r}]", value) for key, value in pairs)
    elif isinstance(thing, (list, tuple)):
        yield from ((f"[{n}]", value) for n, value in enumerate(thing[:_MOST_MEMBERS]))
    elif isinstance(thing, types.FunctionType):
        yield from ((f" -> {name}", value) for name, value in _captured(thing, set()))
    elif not isinstance(thing, (type, types.ModuleType)):
        yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())


def _travels(thing: Any) -> bool:
    try:
        handover.pack(thing)
    except Exception:  # noqa: BLE001  any class may have any trouble with its own pickling
        return False
    return True


def _kind(thing: Any) -> str:
    kind = type(thing)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{home}{kind.__qualname__}"
