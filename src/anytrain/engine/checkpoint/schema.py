"""What the fields of a saved state must be: descriptions that a reader and a check can read.

    POSITION = {"step": Whole(), "rate": Number(), "seed?": Maybe(Whole())}
    check(state, POSITION)

A description is a kind, or a dict of descriptions by field. A field whose name ends in "?" may
be absent; a field that is not described may hold anything, as other versions add some. Needs no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from anytrain.core.text import one_line

MOST = 2**48
"""More than any run counts, and few enough to be added and multiplied."""
_MOST_SHOWN = 60


class Misfit(Exception):
    """A field does not hold what it must."""


class Kind(Protocol):
    """What a value must be."""

    def check(self, value: Any, where: str) -> None:
        """Raise Misfit, naming the field, unless the value is of this kind."""


Description: TypeAlias = Kind | Mapping[str, Any]


def check(value: Any, wanted: Description, where: str = "") -> None:
    """Raise Misfit, naming the field, unless the value is as described."""
    if isinstance(wanted, Mapping):
        _check_fields(value, wanted, where)
    else:
        wanted.check(value, where)


def shown(value: Any) -> str:
    """Return a value as an error may show it: on one line, and short."""
    if value is None or isinstance(value, (bool, float)):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return f"the text {one_line(value, most=_MOST_SHOWN)!r}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} values of shape {tuple(value.shape)}"
    if isinstance(value, (Mapping, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


class Simple:
    """A kind of value that is told by looking at it as a whole."""

    __slots__ = ()

    def holds(self, value: Any) -> bool:
        """Whether the value is of this kind."""
        return True

    def check(self, value: Any, where: str) -> None:
        if not self.holds(value):
            raise Misfit(f"{where or 'it'} is {shown(value)}, and must be {self}")


class Anything(Simple):
    """What only its owner knows."""


@dataclass(frozen=True, slots=True)
class Whole(Simple):
    """A whole number in a range."""

    least: int = 0
    most: int = MOST

    def holds(self, value: Any) -> bool:
        value = _plain(value)
        return type(value) is int and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Number(Simple):
    """A number in a range."""

    least: float = -math.inf
    most: float = math.inf
    finite: bool = True

    def holds(self, value: Any) -> bool:
        value = _plain(value)
        if type(value) is int:
            return abs(value) < 2**1023 and self.least <= value <= self.most
        if type(value) is not float or not math.isfinite(value):
            return type(value) is float and not self.finite
        return self.least <= value <= self.most

    def __str__(self) -> str:
        kind = "a finite number" if self.finite else "a number"
        bounds = [f"at least {self.least:g}"] if self.least > -math.inf else []
        bounds += [f"at most {self.most:g}"] if self.most < math.inf else []
        return " ".join([kind, " and ".join(bounds)]).strip()


@dataclass(frozen=True, slots=True)
class Text(Simple):
    """A text, perhaps one of a few."""

    known: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and (not self.known or value in self.known)

    def __str__(self) -> str:
        return f"one of {', '.join(self.known)}" if self.known else "a text"


@dataclass(frozen=True, slots=True)
class Flag(Simple):
    """True or False."""

    def holds(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Taken(Simple):
    """What somebody takes; he is asked by giving it to him, and must stay as he was."""

    words: str
    take: Callable[[Any], object]

    def holds(self, value: Any) -> bool:
        try:
            self.take(value)
        except Exception:  # noqa: BLE001  # whatever it is, it was not taken
            return False
        return True

    def __str__(self) -> str:
        return self.words


class Either:
    """One kind or another."""

    def __init__(self, *kinds: Description) -> None:
        self.kinds = kinds

    def check(self, value: Any, where: str) -> None:
        """Raise what the last kind says, unless one of them fits."""
        for number, kind in enumerate(self.kinds, start=1):
            try:
                return check(value, kind, where)
            except Misfit:
                if number == len(self.kinds):
                    raise
        return None


class Maybe:
    """A kind, or nothing."""

    def __init__(self, kind: Description) -> None:
        self.kind = kind

    def check(self, value: Any, where: str) -> None:
        """Raise Misfit unless it is None or as described."""
        if value is not None:
            check(value, self.kind, where)


class Each:
    """A list of things of one kind."""

    def __init__(self, kind: Description, count: int | None = None) -> None:
        self.kind, self.count = kind, count

    def check(self, value: Any, where: str) -> None:
        """Raise Misfit unless it is a list, and each thing in it as described."""
        _check_list(value, where, self.count)
        for place, item in enumerate(value):
            check(item, self.kind, f"{where}[{place}]")


class Row:
    """A list with one thing of each kind, in this order."""

    def __init__(self, *kinds: Description) -> None:
        self.kinds = kinds

    def check(self, value: Any, where: str) -> None:
        """Raise Misfit unless it is a list of so many, each as described."""
        _check_list(value, where, len(self.kinds))
        for place, (item, kind) in enumerate(zip(value, self.kinds, strict=True)):
            check(item, kind, f"{where}[{place}]")


class Named:
    """A mapping whose values are all of one kind."""

    def __init__(self, kind: Description, *, any_key: bool = False) -> None:
        self.kind, self.any_key = kind, any_key

    def check(self, value: Any, where: str) -> None:
        """Raise Misfit unless it is a mapping by name, and each value as described."""
        _check_mapping(value, where)
        for name, item in value.items():
            if not (isinstance(name, str) or self.any_key):
                raise Misfit(f"{where or 'it'} has a key that is {shown(name)}, and no name")
            check(item, self.kind, within(where, name))


def _plain(value: Any) -> Any:
    """Return a number of numpy's as Python's: rates and metrics are often some."""
    return value.item() if type(value).__module__ == "numpy" and value.ndim == 0 else value


def within(where: str, name: Any) -> str:
    """Return the place of a field inside another's."""
    text = one_line(name if isinstance(name, str) else shown(name), most=_MOST_SHOWN)
    return f"{where}.{text}" if where else text


def _check_fields(value: Any, wanted: Mapping[str, Any], where: str) -> None:
    _check_mapping(value, where)
    for field, kind in wanted.items():
        name = field.removesuffix("?")
        if name in value:
            check(value[name], kind, within(where, name))
        elif name == field:
            raise Misfit(f"{within(where, name)} is missing")


def _check_mapping(value: Any, where: str) -> None:
    if not isinstance(value, Mapping):
        raise Misfit(f"{where or 'it'} is {shown(value)}, and must be a mapping of fields")


def _check_list(value: Any, where: str, count: int | None) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise Misfit(f"{where or 'it'} is {shown(value)}, and must be a list")
    if count is not None and len(value) != count:
        raise Misfit(f"{where or 'it'} is {shown(value)}, and must have {count} entries")
