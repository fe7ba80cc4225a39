"""Read a function's bytecode: which names it mentions, loads and encloses. Nothing is run."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")


def codes(function: types.FunctionType | types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of all that is written inside of it."""
    found = [function if isinstance(function, types.CodeType) else function.__code__]
    while found:
        code = found.pop()
        yield code
        found += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]


def steps(
    function: types.FunctionType | types.CodeType,
) -> Iterator[tuple[dis.Instruction | None, dis.Instruction]]:
    """Yield each instruction of all that code, and the one before it."""
    for code in codes(function):
        before = None
        for step in dis.get_instructions(code):
            yield before, step
            before = step


def is_attribute(step: dis.Instruction) -> bool:
    """Whether an instruction takes an attribute of what is on top."""
    return step.opname in _ATTRIBUTES


def is_global(step: dis.Instruction) -> bool:
    """Whether an instruction looks a name up in the function's module."""
    return step.opname in _GLOBALS


def loads(step: dis.Instruction, names: tuple[str, ...]) -> bool:
    """Whether it puts a local of one of these names on top; newer Pythons do two at once."""
    last = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    return ("LOAD_FAST" in step.opname or step.opname == "LOAD_DEREF") and last in names


def names(function: types.FunctionType) -> frozenset[str]:
    """Return the names of all globals and attributes that a function mentions."""
    return frozenset(name for code in codes(function) for name in code.co_names)


def words(function: types.FunctionType) -> list[str]:
    """Return the words in a function's text that may be the name of an attribute."""
    constants = (constant for code in codes(function) for constant in code.co_consts)
    return [c for c in constants if isinstance(c, str) and c.isidentifier()]


def globals_of(function: types.FunctionType) -> frozenset[str]:
    """Return the names that a function looks up in its module."""
    return frozenset(str(step.argval) for _, step in steps(function) if is_global(step))


def attributes_of_self(function: types.FunctionType) -> Iterator[str]:
    """Yield the names of the attributes that a method takes of its own object."""
    own = function.__code__.co_varnames[:1]
    for before, step in steps(function):
        if before is not None and is_attribute(step) and loads(before, own):
            yield str(step.argval)


def enclosed(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables around a function that have a value, by their names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    missing = object()
    values = ((name, content(cell, missing)) for name, cell in cells)
    return {name: value for name, value in values if value is not missing}


def content(cell: types.CellType, empty: Any = None) -> Any:
    """Return what a closure's cell holds; `empty` where it is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty
