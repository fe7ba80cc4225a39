"""Find what a user's code does besides computing: a recording would do it only once.

It reads bytecode, so it sees what is written, not what is meant. Where it is in doubt it says so,
and the step runs op by op.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

_LIBRARIES = ("torch", "transformers", "peft", "anytrain", "timm", "diffusers", "torchvision")
_KEEPS = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popleft", "appendleft"}
)
_TELLS = frozenset({"log", "log_metrics", "info", "warning", "debug", "write", "add_scalar"})
_MOVES = frozenset({"global_step", "current_step", "num_updates"})
_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL"})
_DEPTH = 3
_PLAIN = (bool, int, float, str)


def impurity(function: Callable[..., Any]) -> str | None:
    """Name the first line that does more than compute; None where there is none to be seen."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(plain, types.FunctionType) or _is_library(plain.__module__):
        return None
    owner = type(function.__self__) if inspect.ismethod(function) else None
    return _first(plain, owner, _DEPTH)


def model_impurity(model: nn.Module) -> str | None:
    """Name the first line of a model's own classes, or the hook, that does more than compute."""
    for module in model.modules():
        for hook in _hooks(module):
            if not _is_library(getattr(hook, "__module__", None) or type(hook).__module__):
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                return f"the hook {name} on {type(module).__name__} is called at every step"
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        forward: Any = kind.forward
        if isinstance(forward, types.FunctionType) and not _is_library(kind.__module__):
            found = _first(forward, kind, _DEPTH)
            if found is not None:
                return found
    return None


def _hooks(module: nn.Module) -> Iterator[Any]:
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
        yield from hooks.values()


def settings(*functions: Callable[..., Any] | None) -> Callable[[], tuple[Any, ...]]:
    """Return what reads the plain values that the functions look up outside themselves.

    A recording holds them as they were: with other values another recording is needed.
    """
    found: list[Callable[[], Any]] = []
    for function in functions:
        plain = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
        if isinstance(plain, types.FunctionType) and not _is_library(plain.__module__):
            owner = getattr(function, "__self__", None)
            found += [partial(_attribute, owner, name) for name in _own_calls(plain) if owner]
            found += [partial(plain.__globals__.get, name) for name in plain.__code__.co_names]
            found += [partial(_cell, cell) for cell in plain.__closure__ or ()]

    def read() -> tuple[Any, ...]:
        return tuple(v for get in found if isinstance(v := get(), _PLAIN))

    return read


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def place(function: Callable[..., Any]) -> str:
    """Return the file and line where a function is written."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return getattr(function, "__qualname__", repr(function))
    return f"{Path(code.co_filename).name} line {code.co_firstlineno}"


def _is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in _LIBRARIES


def _first(function: types.FunctionType, owner: type | None, depth: int) -> str | None:
    for line, what in _findings(function):
        text = linecache.getline(function.__code__.co_filename, line).strip()
        return f"{Path(function.__code__.co_filename).name} line {line} {what} (`{text}`)"
    if owner is not None and depth > 0:
        for name in _own_calls(function):
            called = inspect.getattr_static(owner, name, None)
            if isinstance(called, types.FunctionType) and not _is_library(called.__module__):
                found = _first(called, owner, depth - 1)
                if found is not None:
                    return found
    return None


def _own_calls(function: types.FunctionType) -> list[str]:
    """Return the names that a method reads from its own object."""
    steps = list(dis.get_instructions(function))
    selfs = function.__code__.co_varnames[:1]
    return [
        str(step.argval)
        for before, step in zip(steps, steps[1:], strict=False)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and _reads(before, selfs)
    ]


def _reads(step: dis.Instruction, names: tuple[str, ...]) -> bool:
    return step.opname.startswith("LOAD_FAST") and step.argval in names


def _findings(function: types.FunctionType) -> Iterator[tuple[int, str]]:
    """Yield each line that does more than compute, and what it does."""
    code = function.__code__
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    line, before = code.co_firstlineno, None
    for step in dis.get_instructions(code):
        line = _line(step) or line
        what = _effect(step, before, given, function.__globals__)
        if what is not None:
            yield line, what
        before = step


def _effect(
    step: dis.Instruction,
    before: dis.Instruction | None,
    given: tuple[str, ...],
    names: dict[str, Any],
) -> str | None:
    if step.opname in _STORES:
        return f"keeps {step.argval!r} for later"
    if step.opname == "LOAD_GLOBAL" and step.argval == "print" and "print" not in names:
        return "prints"
    if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or before is None:
        return None
    if step.argval in _MOVES:
        return f"looks at {step.argval!r}, which changes from step to step"
    if step.argval in _KEEPS and _outlives(before, given, names):
        return "adds to something that outlives the step"
    if step.argval in _TELLS and _tells(before, given, names):
        return "tells somebody"
    return None


def _outlives(before: dis.Instruction, given: tuple[str, ...], names: dict[str, Any]) -> bool:
    """Whether what a method is called on was there before the step: no local of the function."""
    if before.opname.startswith("LOAD_FAST"):
        return False  # an argument's or a local's: tensors have such methods too
    if before.opname == "LOAD_GLOBAL":
        return not isinstance(names.get(str(before.argval)), types.ModuleType)
    return before.opname in ("LOAD_ATTR", "LOAD_DEREF", "LOAD_METHOD")


def _tells(before: dis.Instruction, given: tuple[str, ...], names: dict[str, Any]) -> bool:
    """Whether it is the object's own method, a logger's, or a file's: torch.log is none."""
    if before.opname == "LOAD_GLOBAL":
        known = names.get(str(before.argval))
        return not isinstance(known, types.ModuleType) or known.__name__ in ("logging", "wandb")
    return _reads(before, given[:1]) and given[:1] == ("self",)


def _line(step: dis.Instruction) -> int | None:
    positions = step.positions
    return None if positions is None else positions.lineno
