"""What a user's function looks up outside of itself, and whether that is still the same.

A recording holds such values as they were: with others another recording is needed. Bytecode tells
which names a function looks up; of an object only the attributes with such names are compared.
"""

from __future__ import annotations

import dis
import inspect
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

_LIBRARIES = ("torch", "transformers", "peft", "anytrain", "timm", "diffusers", "torchvision")
_PLAIN = (bool, int, float, str, bytes, type(None))
_ROWS = (list, tuple, set, frozenset, deque)
_MANY = 64
"""Of a container with more entries only its length is compared."""
_DEPTH = 3
_MISSING = object()


class Code(NamedTuple):
    """A user's function as it was written, and the object that it is a method of, if any."""

    function: Any
    owner: Any = None


class Root(NamedTuple):
    """Something that a function looks up."""

    name: str
    get: Callable[[], Any]


def is_library(module: str | None) -> bool:
    """Whether a module of this name is no user's."""
    return (module or "").split(".")[0] in _LIBRARIES


def is_users(value: Any) -> bool:
    """Whether it is an object of a class that the user has written."""
    module = type(value).__module__
    return module != "builtins" and not is_library(module)


def written(function: Any) -> Code | None:
    """Return the user's code that is run when this is called; None where it is none of theirs."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if isinstance(function, nn.Module):
        owner, function = function, type(function).forward
    elif not isinstance(function, (types.FunctionType, types.MethodType)):
        owner, function = function, inspect.getattr_static(type(function), "__call__", None)
    plain: Any = getattr(function, "__func__", function)
    plain = inspect.unwrap(plain) if callable(plain) else None
    if not isinstance(plain, types.FunctionType) or is_library(plain.__module__):
        return None
    return Code(plain, owner)


def codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of all that is written inside of it."""
    found = [function.__code__]
    while found:
        code = found.pop()
        yield code
        found += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]


def names_of(function: types.FunctionType) -> frozenset[str]:
    """Return all names of globals and attributes that a function mentions."""
    return frozenset(name for code in codes(function) for name in code.co_names)


def own_names(function: types.FunctionType) -> list[str]:
    """Return the names that a method reads from its own object."""
    selfs = function.__code__.co_varnames[:1]
    found = [
        str(step.argval)
        for code in codes(function)
        for before, step in _pairs(code)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and reads(before, selfs)
    ]
    if "getattr" in names_of(function):
        found += [c for code in codes(function) for c in code.co_consts if _is_name(c)]
    return found


def _is_name(constant: Any) -> bool:
    return isinstance(constant, str) and constant.isidentifier()


def _pairs(code: types.CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    steps = list(dis.get_instructions(code))
    return zip(steps, steps[1:], strict=False)


def reads(step: dis.Instruction, names: tuple[str, ...]) -> bool:
    """Whether a step puts a local of one of these names on top; newer Pythons do two at once."""
    last = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    return ("LOAD_FAST" in step.opname or step.opname == "LOAD_DEREF") and last in names


def roots(code: Code) -> Iterator[Root]:
    """Yield what a function looks up: globals, what it encloses, defaults, its object's own."""
    function, owner = code
    known = function.__globals__
    for name in sorted(names_of(function)):
        if name in known:
            yield Root(name, partial(known.get, name))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Root(name, partial(_cell, cell))
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield Root("", partial(_same, value))
    if owner is not None:
        for name in own_names(function):
            yield Root(name, partial(_attribute, owner, name))


def _same(value: Any) -> Any:
    return value


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001  a property of the user's that does not work here
        return None


def called(code: Code) -> Iterator[Code]:
    """Yield the user's own code that a function may call."""
    names = names_of(code.function)
    for root in roots(code):
        yield from _callable(root.get(), names)
    if "super" in names and code.owner is not None:
        for kind in type(code.owner).__mro__:
            for found in _functions(vars(kind), names):
                yield Code(found.function, code.owner)


def _callable(value: Any, names: frozenset[str]) -> Iterator[Code]:
    if isinstance(value, nn.Module):
        for module in value.modules():
            yield from _only(module)
    elif isinstance(value, (types.FunctionType, types.MethodType, partial)):
        yield from _only(value)
    elif isinstance(value, types.ModuleType):
        yield from _functions(vars(value), names)
    elif is_users(value) and not isinstance(value, type):
        yield from _only(value)
        for code in chain.from_iterable(
            _functions(vars(kind), names) for kind in type(value).__mro__
        ):
            yield Code(code.function, value)


def _functions(held: Mapping[str, Any], names: frozenset[str]) -> Iterator[Code]:
    """Yield the user's functions among what a module or a class holds under these names."""
    for name in names & held.keys():
        if isinstance(held[name], types.FunctionType):
            yield from _only(held[name])


def _only(value: Any) -> Iterator[Code]:
    found = written(value)
    if found is not None:
        yield found


def settings(
    *functions: Callable[..., Any] | None, model: nn.Module | None = None
) -> Callable[[], tuple[Any, ...]]:
    """Return what reads the values, tensors and models that functions look up elsewhere.

    Of a model, which is looked at elsewhere, what its own classes look up in globals, and in
    objects and containers that it holds.
    """
    getters: list[Callable[[], Any]] = []
    for function in functions:
        getters += _given(function)
        code = written(function)
        if code is not None:
            getters += _getters(code, _DEPTH, set())
    if model is not None:
        getters += _held(model)
    # What is never the same, as an object that a property makes anew, cannot be compared.
    getters = [get for get in getters if get() == get()]

    def read() -> tuple[Any, ...]:
        return tuple(get() for get in getters)

    return read


def _given(function: Any) -> Iterator[Callable[[], Any]]:
    """Yield what reads the arguments that a partial holds."""
    while isinstance(function, partial):
        code = written(function)
        names = frozenset() if code is None else names_of(code.function)
        for value in (*function.args, *function.keywords.values()):
            yield partial(_read, partial(_same, value), names)
        function = function.func


def _getters(code: Code, depth: int, seen: set[Any]) -> Iterator[Callable[[], Any]]:
    mark = code.function, id(code.owner)
    if mark in seen:
        return
    seen.add(mark)
    names = names_of(code.function)
    for root in roots(code):
        yield partial(_read, root.get, names)
    if depth > 0:
        for other in called(code):
            yield from _getters(other, depth - 1, seen)


def _held(model: nn.Module) -> Iterator[Callable[[], Any]]:
    seen: set[Any] = set()
    for module in model.modules():
        code = written(module)
        if code is None:
            continue
        names = names_of(code.function)
        for root in roots(code):
            value = root.get()
            mark = id(value), names
            if mark not in seen and not isinstance(value, (*_PLAIN, nn.Module, nn.Parameter)):
                seen.add(mark)
                yield partial(_read, root.get, names)
        for root in roots(Code(code.function)):
            if (root.name, names) not in seen and isinstance(root.get(), _PLAIN):
                seen.add((root.name, names))
                yield partial(_read, root.get, names)


def _read(get: Callable[[], Any], names: frozenset[str]) -> Any:
    try:
        return _token(get(), names, _DEPTH)
    except Exception:  # noqa: BLE001  an object of the user's that cannot be looked at
        return None


class _Object:
    """An object, to compare by identity; it may be gone by then, and another in its place."""

    __slots__ = ("_find", "_number")

    def __init__(self, value: Any) -> None:
        self._number = id(value)
        try:
            self._find: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._find = partial(_same, value)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Object) or self._number != other._number:
            return False
        value = self._find()
        return value is not None and value is other._find()


def _token(value: Any, names: frozenset[str], depth: int) -> Any:
    """Return what tells a value from another: itself, or where it lies and what it holds."""
    for kinds, tell in _TOKENS:
        if isinstance(value, kinds):
            return tell(value, names, depth)
    if not is_users(value) and _has_value(value):
        return value
    held = () if depth == 0 else _attributes(value, names, depth)
    return _Object(value), held, _of_module(value) if isinstance(value, nn.Module) else ()


def _has_value(value: Any) -> bool:
    """Whether it is as good as another that equals it, as a torch.device is."""
    kind: Any = type(value)
    return kind.__eq__ is not object.__eq__ and kind.__hash__ not in (None, object.__hash__)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor lies, and its version where a recording has read its values."""
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # one that lies nowhere
        place = id(tensor)
    return place, tensor._version if tensor.ndim == 0 or tensor.device.type == "cpu" else 0


def _array(array: np.ndarray[Any, Any]) -> Any:
    return array.tobytes() if array.size <= _MANY else id(array)


def _entries(value: Any, names: frozenset[str], depth: int) -> Any:
    if len(value) > _MANY or depth == 0:
        return id(value), len(value)
    if isinstance(value, dict):
        return tuple((_key(k), _token(v, names, depth - 1)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(_token(entry, names, depth - 1) for entry in value)
    return tuple(_token(entry, names, depth - 1) for entry in value)


def _key(key: Any) -> Any:
    return key if isinstance(key, _PLAIN) else id(key)


def _attributes(value: Any, names: frozenset[str], depth: int) -> tuple[Any, ...]:
    """Return those of an object, a class or a module that a function may mean."""
    kinds = type(value).__mro__ if is_users(value) else ()
    own = getattr(value, "__dict__", {})
    slots = {name for kind in kinds for name in getattr(kind, "__slots__", ())}
    found = []
    for name in sorted(names & (own.keys() | slots | _class_values(value))):
        entry = own.get(name, _MISSING)
        entry = inspect.getattr_static(value, name, None) if entry is _MISSING else entry
        if isinstance(entry, (types.MemberDescriptorType,)):
            entry = getattr(value, name, None)
        found.append((name, _token(entry, names, depth - 1)))
    return tuple(found)


def _class_values(value: Any) -> set[str]:
    """Return the names of plain values that a user's class holds for its objects."""
    if not is_users(value) or isinstance(value, (type, types.ModuleType)):
        return set()
    return {
        name
        for kind in type(value).__mro__
        if not is_library(kind.__module__)
        for name, held in vars(kind).items()
        if isinstance(held, _PLAIN)
    }


def _of_module(module: nn.Module) -> tuple[Any, ...]:
    """Return where a model's weights lie; of a loss of the user's also its numbers."""
    first = next(module.parameters(), None)
    parts = list(islice(module.modules(), _MANY))
    is_loss = is_users(module) and len(parts) < _MANY
    own = [_numbers(part) for part in parts] if is_loss else []
    return None if first is None else first.data_ptr(), module.training, *own


def _numbers(module: nn.Module) -> tuple[Any, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, _PLAIN))


def _of_namespace(value: types.ModuleType, names: frozenset[str], depth: int) -> Any:
    is_plain = is_library(value.__name__) or depth == 0
    return value.__name__, () if is_plain else _attributes(value, names, depth)


_TOKENS: tuple[tuple[Any, Callable[[Any, frozenset[str], int], Any]], ...] = (
    (_PLAIN, lambda value, names, depth: value),
    (torch.Tensor, lambda value, names, depth: _place(value)),
    (np.ndarray, lambda value, names, depth: _array(value)),
    ((*_ROWS, dict), _entries),
    (types.MethodType, lambda value, names, depth: _Object(value.__func__)),
    (types.ModuleType, _of_namespace),
)
