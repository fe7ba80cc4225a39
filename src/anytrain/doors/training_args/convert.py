"""Turn what files and command lines give into the types that fields declare.

YAML reads 1e-4 as a string, JSON has no integers of its own, a shell has nothing but strings.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from anytrain.core import documents
from anytrain.core.errors import BadType

TRUE = ("yes", "true", "t", "y", "1", "on")
FALSE = ("no", "false", "f", "n", "0", "off")


class Unreadable(Exception):
    """A value that a type cannot hold; the caller names the argument."""


def to_bool(value: Any) -> bool:
    """Return yes or no.

    >>> to_bool("True"), to_bool("no"), to_bool(1)
    (True, False, True)
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in (*TRUE, *FALSE):
        return value.strip().lower() in TRUE
    if type(value) is int and value in (0, 1):
        return value == 1
    raise Unreadable("true or false")


def to_int(value: Any) -> int:
    """Return a whole number.

    >>> to_int("8"), to_int(8.0), to_int("1e3")
    (8, 8, 1000)
    """
    if isinstance(value, bool):
        raise Unreadable("a whole number")
    if hasattr(value, "__index__"):
        return int(value)
    try:
        number = int(value) if isinstance(value, str) and value.strip().isdecimal() else None
        if number is None:
            real = float(value)
            number = int(real)
            if number != real:
                raise Unreadable("a whole number")
    except (TypeError, ValueError, OverflowError):
        raise Unreadable("a whole number") from None
    return number


def to_float(value: Any) -> float | int:
    """Return a number; a whole number that came as one stays one.

    >>> to_float("1e-4"), to_float(3)
    (0.0001, 3)
    """
    if isinstance(value, bool):
        raise Unreadable("a number")
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]  # the line above says which
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Unreadable("a number") from None


def to_str(value: Any) -> str:
    """Return text; paths and numbers are written out."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if type(value) in (int, float):
        return str(value)
    raise Unreadable("text")


def to_dict(value: Any) -> dict[str, Any]:
    """Return a mapping, from itself or from JSON text; text in it that is a number becomes one."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return {key: plain(item) for key, item in documents.from_json(value).items()}
        except ValueError:
            pass
    raise Unreadable('a dict, or JSON text such as {"key": 1}')


def plain(value: Any) -> Any:
    """Return text as the number or truth that it spells, and everything else as it is.

    >>> plain("0.5"), plain("true"), plain("cosine")
    (0.5, True, 'cosine')
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


_BY_TYPE: dict[Any, Callable[[Any], Any]] = {
    bool: to_bool,
    int: to_int,
    float: to_float,
    str: to_str,
}


def is_union(hint: Any) -> bool:
    """Whether the hint offers several types."""
    return get_origin(hint) in (Union, UnionType)


def members(hint: Any) -> tuple[Any, ...]:
    """Return the types that a hint offers, None left out.

    >>> members(int | None)
    (<class 'int'>,)
    """
    kinds = get_args(hint) if is_union(hint) else (hint,)
    return tuple(kind for kind in kinds if kind is not NoneType)


def takes_none(hint: Any) -> bool:
    """Whether None is among the values that a hint allows."""
    return hint in (None, NoneType, Any) or (is_union(hint) and NoneType in get_args(hint))


def converted(name: str, value: Any, hint: Any) -> Any:
    """Return the value in the first of the hint's types that holds it, or refuse it by name."""
    if value is None and takes_none(hint):
        return None
    wanted = []
    for kind in members(hint):
        try:
            return one(value, kind)
        except Unreadable as problem:
            wanted.append(str(problem))
    raise BadType(
        f"Cannot use {name}={value!r}.",
        why=f"{name} must be {' or '.join(dict.fromkeys(wanted))}.",
        fix=f"pass another value, or leave {name} out.",
    )


def one(value: Any, kind: Any) -> Any:
    """Return the value as one type, raising Unreadable where that cannot be."""
    origin = get_origin(kind)
    if origin is Literal:
        return _literal(value, get_args(kind))
    if kind in _BY_TYPE:
        return _BY_TYPE[kind](value)
    if origin in (list, tuple, set) or kind in (list, tuple, set):
        return _collection(value, origin or kind, get_args(kind))
    if origin is dict or kind is dict:
        return to_dict(value)
    if isinstance(kind, type) and not isinstance(value, kind):
        if issubclass(kind, Enum):
            return kind(value)
        raise Unreadable(f"a {kind.__name__}")
    return value


def _literal(value: Any, words: tuple[Any, ...]) -> Any:
    for word in words:
        if value == word or str(value) == str(word):
            return word
    raise Unreadable(f"one of {', '.join(map(repr, words))}")


def _collection(value: Any, kind: type[Any], inner: tuple[Any, ...]) -> Any:
    if isinstance(value, str) or not hasattr(value, "__iter__") or isinstance(value, dict):
        raise Unreadable("a list")
    hint = inner[0] if inner else Any
    return kind(converted("each item", item, hint) for item in value)
