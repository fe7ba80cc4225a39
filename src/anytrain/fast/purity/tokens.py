"""What tells a value that a user's function looks up from another one.

Tokens are cheap enough to be made at every step, can be compared and hashed, and hold nothing
large: of an object that is gone they only know that it was another one.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from anytrain.fast.purity.users import is_installed, is_library, is_users, is_users_class

PLAIN = (bool, int, float, str, bytes, type(None))
_ROWS = (list, tuple, set, frozenset, deque)
_MANY = 64
"""Of a container with more entries only its length is compared."""
Names = frozenset[str]
"""Those that a function mentions: of an object only attributes of such names are compared."""


def same(value: Any) -> Any:
    """Return the value."""
    return value


def in_class(owner: Any, name: str) -> Any:
    """Return what an object's class has under a name, uncalled."""
    return inspect.getattr_static(type(owner), name, None)


def attribute(owner: Any, name: str) -> Any:
    """Return an object's attribute; None where there is none to be had."""
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001  an object of the user's with ways of its own
        return None


class _Object:
    """An object, to compare by identity; it may be gone by then, and another in its place."""

    __slots__ = ("_find", "_number")

    def __init__(self, value: Any) -> None:
        self._number = id(value)
        try:
            self._find: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._find = partial(same, value)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Object) or self._number != other._number:
            return False
        value = self._find()
        return value is not None and value is other._find()


def token(value: Any, names: Names, depth: int) -> Any:
    """Return what tells a value from another: itself, or where it lies and what it holds."""
    for kinds, tell in _TOKENS:
        if isinstance(value, kinds):
            return tell(value, names, depth)
    if not is_users(value) and _has_value(type(value)):
        return value
    return _Object(value), _attributes(value, names, depth) if depth else ()


def _has_value(kind: Any) -> bool:
    """Whether one object is as good as another that equals it, as a torch.device is."""
    return kind.__eq__ is not object.__eq__ and kind.__hash__ not in (None, object.__hash__)


def _of_tensor(tensor: torch.Tensor, names: Names, depth: int) -> tuple[int, int]:
    """Return where a tensor lies, and its version where a recording has read its values."""
    is_read = tensor.device.type == "cpu" and not isinstance(tensor, nn.Parameter)
    return tensor.data_ptr(), tensor._version if is_read else 0


def _of_array(array: np.ndarray[Any, Any], names: Names, depth: int) -> Any:
    return array.tobytes() if array.size <= _MANY else id(array)


def _of_model(model: nn.Module, names: Names, depth: int) -> tuple[Any, ...]:
    """Return where a model's weights lie; what it looks up is read by itself."""
    first = next(model.parameters(), None)
    return _Object(model), None if first is None else first.data_ptr(), model.training


def _of_entries(value: Any, names: Names, depth: int) -> Any:
    if len(value) > _MANY or depth == 0:
        return id(value), len(value)
    if isinstance(value, dict):
        return tuple((_of_key(k), token(v, names, depth - 1)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(token(entry, names, depth - 1) for entry in value)
    return tuple(token(entry, names, depth - 1) for entry in value)


def _of_key(key: Any) -> Any:
    return key if isinstance(key, PLAIN) else id(key)


def _of_namespace(value: types.ModuleType, names: Names, depth: int) -> Any:
    is_users = not is_library(value.__name__) and not is_installed(
        getattr(value, "__file__", None) or ""
    )
    return value.__name__, _attributes(value, names, depth) if is_users and depth else ()


def _attributes(value: Any, names: Names, depth: int) -> tuple[Any, ...]:
    """Return those of an object, a class or a module that a function may mean."""
    own = getattr(value, "__dict__", {})
    if is_users(value) and in_class(value, "__getattr__") is not None:
        names = names | own.keys()  # its attributes may be entries of something that it holds
    found = [(name, own[name]) for name in sorted(names & own.keys())]
    if not isinstance(value, (type, types.ModuleType)):
        kind: Any = type(value)
        more = names & _kept_by_class(kind)
        found += [(name, attribute(value, name)) for name in sorted(more - own.keys())]
    return tuple((name, token(entry, names, depth - 1)) for name, entry in found)


@lru_cache(maxsize=4096)
def _kept_by_class(kind: Any) -> frozenset[str]:
    """Return the names of values that objects have by their class: slots, and what they share."""
    shared = (*PLAIN, types.MemberDescriptorType)
    kinds = [each for each in kind.__mro__ if is_users_class(each)]
    return frozenset(
        n for each in kinds for n, held in vars(each).items() if isinstance(held, shared)
    )


_TOKENS: tuple[tuple[Any, Callable[[Any, Names, int], Any]], ...] = (
    (PLAIN, lambda value, names, depth: value),
    (torch.Tensor, _of_tensor),
    (nn.Module, _of_model),
    (np.ndarray, _of_array),
    ((*_ROWS, dict), _of_entries),
    (types.MethodType, lambda value, names, depth: _Object(value.__func__)),
    (types.ModuleType, _of_namespace),
)
