"""What a user's function looks up outside of itself, and whether that is still the same.

A recording holds such values as they were: with others another recording is needed. Bytecode tells
which names a function looks up; of an object only the attributes with such names are compared, and
of a module (`nn.Module`) what its own `forward` looks up.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import nn

from anytrain.core import bytecode
from anytrain.fast.purity.tokens import PLAIN, Names, attribute, in_class, same, token
from anytrain.fast.purity.users import is_installed, is_library, is_users

_COMPUTED = (property, cached_property)
_DEPTH = 3
Getter = Callable[[], Any]


class Code(NamedTuple):
    """A user's function as it was written, and the object that it is a method of, if any."""

    function: Any
    owner: Any = None


class Root(NamedTuple):
    """Something that a function looks up."""

    name: str
    get: Getter


def written(value: Any, caller: Code | None = None) -> Code | None:
    """Return the user's code that is run when this is called; None where it is none of theirs.

    What the user's code calls is read too, if it is of the same package or not installed like a
    library's.
    """
    while isinstance(value, partial):
        value = value.func
    owner = value.__self__ if isinstance(value, types.MethodType) else None
    if owner is None and not isinstance(value, types.FunctionType):
        name = "forward" if isinstance(value, nn.Module) else "__call__"
        kinds = (vars(kind) for kind in type(value).__mro__)
        owner, value = value, next((own[name] for own in kinds if name in own), None)
    plain: Any = getattr(value, "__func__", value)
    plain = inspect.unwrap(plain) if isinstance(plain, types.FunctionType) else None
    if not isinstance(plain, types.FunctionType) or is_library(plain.__module__):
        return None
    is_far = caller is not None and _package(plain) != _package(caller.function)
    return None if is_far and is_installed(plain.__code__.co_filename) else Code(plain, owner)


def _package(function: Any) -> str:
    return str(function.__module__).split(".")[0]


def attributes_of(function: types.FunctionType) -> Names:
    """Return the names of all attributes that a function may mean."""
    found = bytecode.names(function)
    return found.union(bytecode.words(function)) if "getattr" in found else found


def _own_names(function: types.FunctionType) -> Iterator[str]:
    """Yield the names that a method reads from its own object."""
    yield from bytecode.attributes_of_self(function)
    if "getattr" in bytecode.globals_of(function):
        yield from bytecode.words(function)


def roots(code: Code) -> Iterator[Root]:
    """Yield all that a function looks up."""
    yield from _around(code.function)
    yield from _own(code)


def _around(function: Any) -> Iterator[Root]:
    """Yield a function's globals, what it encloses, and the defaults of its arguments."""
    known = function.__globals__
    for name in sorted(bytecode.globals_of(function) & known.keys()):
        yield Root(name, partial(known.get, name))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Root(name, partial(bytecode.content, cell))
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield Root("", partial(same, value))


def _own(code: Code) -> Iterator[Root]:
    """Yield what a method reads from its object; properties are code, and not called."""
    for name in () if code.owner is None else dict.fromkeys(_own_names(code.function)):
        if not isinstance(in_class(code.owner, name), _COMPUTED):
            yield Root(name, partial(attribute, code.owner, name))


def called(code: Code) -> Iterator[Code]:
    """Yield the user's own code that a function may call."""
    names = attributes_of(code.function)
    for root in roots(code):
        yield from _callable(root.get(), names, code)
    if code.owner is None:
        return
    for name in _own_names(code.function):
        found = in_class(code.owner, name)
        if isinstance(found, _COMPUTED):
            compute = found.fget if isinstance(found, property) else found.func
            yield from _followed([compute], code, code.owner)
    if "super" in names:
        for kind in type(code.owner).__mro__:
            yield from _followed(_functions(vars(kind), names), code, code.owner)


def _callable(value: Any, names: Names, caller: Code) -> Iterator[Code]:
    if isinstance(value, nn.Module):
        yield from _followed(value.modules(), caller)
    elif isinstance(value, (types.FunctionType, types.MethodType, partial)):
        yield from _followed([value], caller)
    elif isinstance(value, types.ModuleType):
        yield from _followed(_functions(vars(value), names), caller)
    elif is_users(value) and not isinstance(value, type):
        yield from _followed([value], caller)
        for kind in type(value).__mro__:
            yield from _followed(_functions(vars(kind), names), caller, value)


def _functions(held: Mapping[str, Any], names: Names) -> Iterator[Any]:
    """Yield the functions among what a module or a class holds under these names."""
    found = (held[name] for name in sorted(names & held.keys()))
    return (each for each in found if isinstance(each, types.FunctionType))


def _followed(values: Iterable[Any], caller: Code, owner: Any = None) -> Iterator[Code]:
    """Yield the user's code among values that are called, as methods of an owner if it is given."""
    for value in values:
        found = written(value, caller)
        if found is not None:
            yield found if owner is None else Code(found.function, owner)


def settings(
    *functions: Callable[..., Any] | None, model: nn.Module | None = None
) -> Callable[[], tuple[Any, ...]]:
    """Return what reads the values, tensors and models that functions look up elsewhere.

    Of a model, whose own attributes are compared elsewhere, only what they hold in turn.
    """
    getters: list[Getter] = []
    seen: set[Any] = set()
    for function in functions:
        getters += _given(function)
        code = written(function)
        if code is not None and isinstance(function, nn.Module):
            getters += _held(function, seen, None)
        elif code is not None:
            getters += _getters(code, _DEPTH, seen)
    if model is not None:
        getters += _held(model, seen, None, is_watched=True)
    # What is never the same, as an object that is made anew each time, cannot be compared.
    getters = [get for get in getters if get() == get()]

    def read() -> tuple[Any, ...]:
        return tuple(get() for get in getters)

    return read


def _given(function: Any) -> Iterator[Getter]:
    """Yield what reads the arguments that a partial holds."""
    code = written(function) if isinstance(function, partial) else None
    while code is not None and isinstance(function, partial):
        for value in (*function.args, *function.keywords.values()):
            yield partial(_read, partial(same, value), attributes_of(code.function))
        function = function.func


def _getters(code: Code, depth: int, seen: set[Any]) -> Iterator[Getter]:
    """Yield what reads all that a function, and others that it calls, look up."""
    mark = code.function, id(code.owner)
    if mark in seen:
        return
    seen.add(mark)
    names = attributes_of(code.function)
    for root in roots(code):
        yield partial(_read, root.get, names)
        value = root.get()
        if isinstance(value, nn.Module):
            yield from _held(value, seen, code)
    for other in called(code) if depth else ():
        if not isinstance(other.owner, nn.Module):
            yield from _getters(other, depth - 1, seen)


def _held(
    model: nn.Module, seen: set[Any], caller: Code | None, *, is_watched: bool = False
) -> Iterator[Getter]:
    """Yield what reads all that a model's own classes look up; parameters stay where they are.

    `is_watched` says that others look at the model's own attributes, though not into them.
    """
    for module in model.modules():
        code = written(module, caller)
        if code is None or id(module) in seen:
            continue
        seen.add(id(module))
        names = attributes_of(code.function)
        if code.function not in seen:
            seen.add(code.function)
            yield from (partial(_read, root.get, names) for root in _around(code.function))
        for root in _own(code):
            value = root.get()
            mark = id(value), names
            if isinstance(value, (nn.Module, nn.Parameter)):
                continue
            if not is_watched if isinstance(value, PLAIN) else mark not in seen:
                seen.add(mark)
                yield partial(_read, root.get, names)


def _read(get: Getter, names: Names) -> Any:
    try:
        return token(get(), names, _DEPTH)
    except Exception:  # noqa: BLE001  an object of the user's that cannot be looked at
        return None
