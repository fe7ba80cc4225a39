"""The table of backends, and the choice among them.

A vendor's file is imported when its turn comes. The order is the order of preference; `fake` is
not in it and answers only to its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from anytrain.core.errors import BadInput, DeviceBroken
from anytrain.core.facts import Found, NotFound
from anytrain.core.nearest import nearest
from anytrain.core.plan import Wish
from anytrain.machine.backends.base import Backend

_ROOM = "anytrain.machine.backends"
TABLE = {
    "tpu": f"{_ROOM}.tpu:Tpu",
    "xla": f"{_ROOM}.xla:Xla",
    "cuda": f"{_ROOM}.cuda:Cuda",
    "mps": f"{_ROOM}.mps:Mps",
    "cpu": f"{_ROOM}.cpu:Cpu",
}
BY_NAME_ONLY = {"fake": f"{_ROOM}.fake:Fake"}
_ALIASES = {"gpu": "cuda"}
_STANDS_IN: Backend | None = None
_ON_PURPOSE = "take the CPU on purpose: ANYTRAIN_DEVICE=cpu or cpu=True"


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A backend's name and what its probe said."""

    name: str
    answer: Found | NotFound


def parse_device(text: str) -> tuple[str, int | None]:
    """Split a device's name from its number.

    >>> parse_device("cuda:1")
    ('cuda', 1)
    >>> parse_device("gpu")
    ('cuda', None)
    """
    name, colon, number = text.strip().lower().partition(":")
    name = _ALIASES.get(name, name)
    known = [*TABLE, *BY_NAME_ONLY]
    if name not in known or (colon and not number.isdecimal()):
        near = None if name in known else nearest(name, known)
        usual = 'pass one of these, such as "cuda" or "cuda:1", or nothing for the best one here.'
        raise BadInput(
            f"Unknown device {text!r}.",
            why=f"the known ones are {', '.join(known)}, with a number where there are several.",
            fix=f"did you mean {near!r}?" if near else usual,
        )
    return name, int(number) if colon else None


def get(name: str) -> Backend:
    """Return the backend of that name, whether or not this host has it; "cuda:1" pins a GPU."""
    short, index = parse_device(name)
    module, _, kind = {**TABLE, **BY_NAME_ONLY}[short].partition(":")
    backend: Backend = getattr(import_module(module), kind)(index)
    return backend


def survey() -> list[Surveyed]:
    """Probe every backend, in order of preference."""
    return [Surveyed(name, get(name).probe()) for name in TABLE]


def stand_in(backend: Backend | None) -> None:
    """Let every choice in this process fall on one backend: a traced run's device is claimed."""
    global _STANDS_IN
    _STANDS_IN = backend


def choose(asked: Wish | None) -> Backend:
    """Return the backend that was asked for, or the first one found; refuse a broken one."""
    if _STANDS_IN is not None:
        return _STANDS_IN
    return _automatic() if asked is None else _asked(asked)


def _automatic() -> Backend:
    for name in TABLE:
        backend = get(name)
        answer = backend.probe()
        if isinstance(answer, Found):
            if answer.automatic:
                return backend
        elif answer.broken:
            raise _broken(f"{name} is present and fails.", answer)
    raise AssertionError("the CPU is always found")


def _asked(asked: Wish) -> Backend:
    backend = get(asked.value)
    answer = backend.probe()
    if isinstance(answer, NotFound):
        if answer.broken:
            raise _broken(f"Cannot use device {asked}.", answer)
        raise BadInput(
            f"Cannot use device {asked}.",
            why=f"{answer.because}; {_found_here()}.",
            fix="name a device that was found, or none for the best one here.",
        )
    _, index = parse_device(asked.value)
    if index is not None and index >= answer.num_devices:
        raise BadInput(
            f"Cannot use device {asked}.",
            why=f"{backend.name} has {answer.num_devices} device(s) here, counted from 0.",
            fix=f"pass {backend.name}:{answer.num_devices - 1} or less.",
        )
    return backend


def _broken(what: str, answer: NotFound) -> DeviceBroken:
    repair = f"{answer.fix}, or {_ON_PURPOSE}." if answer.fix else f"{_ON_PURPOSE}."
    return DeviceBroken(what, why=f"{answer.because}.", fix=repair)


def _found_here() -> str:
    found = [each.name for each in survey() if isinstance(each.answer, Found)]
    return f"found here: {', '.join(found)}"
