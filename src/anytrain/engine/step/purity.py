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

import torch
from torch import nn

_LIBRARIES = ("torch", "transformers", "peft", "anytrain", "timm", "diffusers", "torchvision")
_KEEPS = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popleft", "appendleft"}
)
_TELLS = frozenset({"log", "log_metrics", "info", "warning", "debug", "write", "add_scalar"})
_MOVES = frozenset({"global_step", "current_step", "num_updates", "epoch", "current_epoch"})
_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL"})
_OUTSIDE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "LOAD_GLOBAL")
_DEPTH = 3
_PLAIN = (bool, int, float, str)


def impurity(function: Callable[..., Any]) -> str | None:
    """Name the first line that does more than compute; None where there is none to be seen."""
    plain, owner = _written(function)
    if plain is None:
        return None
    return _first(plain, None if owner is None else type(owner), _DEPTH)


def _written(function: Any) -> tuple[types.FunctionType | None, Any]:
    """Return a user's function as it was written, and the object it is a method of."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        function = getattr(function, "__call__", function)  # noqa: B004  an object that is called
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(plain, types.FunctionType) or _is_library(plain.__module__):
        return None, None
    return plain, getattr(function, "__self__", None)


def model_impurity(model: nn.Module) -> str | None:
    """Name the first line of a model's own classes, or the hook, that does more than compute."""
    hook = hooked(model)
    if hook is not None:
        return hook
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        forward: Any = kind.forward
        if isinstance(forward, types.FunctionType) and not _is_library(kind.__module__):
            found = _first(forward, kind, _DEPTH)
            if found is not None:
                return found
    return None


def hooked(model: nn.Module) -> str | None:
    """Name a hook of the user's on a module or a parameter."""
    for module in model.modules():
        for hook in _hooks(module):
            if not _is_library(getattr(hook, "__module__", None) or type(hook).__module__):
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                return f"the hook {name} on {type(module).__name__} is called at every step"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"a hook on the parameter {name} is called at every step"
    return None


def _hooks(module: nn.Module) -> Iterator[Any]:
    for hooks in (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    ):
        yield from hooks.values()


def settings(*functions: Callable[..., Any] | None) -> Callable[[], tuple[Any, ...]]:
    """Return what reads the values, tensors and models that the functions look up elsewhere.

    A recording holds them as they were: with others another recording is needed.
    """
    found: list[Callable[[], Any]] = []
    for function in functions:
        plain, owner = _written(function)
        if plain is not None:
            found += _lookups(plain, owner, _DEPTH)

    def read() -> tuple[Any, ...]:
        return tuple(token for get in found if (token := _token(get())) is not None)

    return read


def _lookups(function: types.FunctionType, owner: Any, depth: int) -> list[Callable[[], Any]]:
    """Return what reads each name that a function, or one that it calls, looks up."""
    found: list[Callable[[], Any]] = [
        partial(function.__globals__.get, name) for name in function.__code__.co_names
    ]
    found += [partial(_cell, cell) for cell in function.__closure__ or ()]
    if owner is not None:
        found += [partial(_attribute, owner, name) for name in _own_calls(function)]
    if depth > 0:
        for called in _called(function, None if owner is None else type(owner)):
            found += _lookups(called, owner, depth - 1)
    return found


def _token(value: Any) -> Any:
    """Return what tells a value from another: itself, or where a tensor or a model's lies."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value._version if value.ndim == 0 else 0
    if isinstance(value, nn.Module):
        first = next(value.parameters(), None)
        return id(value), None if first is None else first.data_ptr(), value.training
    return None


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
    if depth > 0:
        for called in _called(function, owner):
            found = _first(called, owner, depth - 1)
            if found is not None:
                return found
    return None


def _called(function: types.FunctionType, owner: type | None) -> Iterator[types.FunctionType]:
    """Yield the user's functions, and methods of the same object, that a function names."""
    names = _own_calls(function) if owner is not None else []
    own = [inspect.getattr_static(owner, name, None) for name in names]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    for called in (*own, *named):
        is_users = isinstance(called, types.FunctionType) and not _is_library(called.__module__)
        if is_users and called is not function:
            yield called


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
    line = code.co_firstlineno
    earlier: list[dis.Instruction] = []
    for step in dis.get_instructions(code):
        line = _line(step) or line
        what = _effect(step, earlier, given, function)
        if what is not None:
            yield line, what
        earlier = [*earlier[-2:], step]


def _effect(
    step: dis.Instruction,
    earlier: list[dis.Instruction],
    given: tuple[str, ...],
    function: types.FunctionType,
) -> str | None:
    names, free = function.__globals__, function.__code__.co_freevars
    before = earlier[-1] if earlier else None
    if step.opname in _STORES or (step.opname == "STORE_DEREF" and step.argval in free):
        return f"keeps {step.argval!r} for later"
    if step.opname == "STORE_SUBSCR" and len(earlier) > 1 and earlier[-2].opname in _OUTSIDE:
        return "writes into something that outlives the step"
    if step.opname == "LOAD_GLOBAL" and step.argval == "print" and "print" not in names:
        return "prints"
    if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or before is None:
        return None
    return _called_method(str(step.argval), before, given, names)


def _called_method(
    name: str, before: dis.Instruction, given: tuple[str, ...], names: dict[str, Any]
) -> str | None:
    if name in _MOVES:
        return f"looks at {name!r}, which changes from step to step"
    if name in _KEEPS and _outlives(before, names):
        return "adds to something that outlives the step"
    if name in _TELLS and _tells(before, given, names):
        return "tells somebody"
    return None


def _outlives(before: dis.Instruction, names: dict[str, Any]) -> bool:
    """Whether what a method is called on was there before the step: no local of the function."""
    if before.opname.startswith("LOAD_FAST"):
        return False  # an argument's or a local's: tensors have such methods too
    if before.opname == "LOAD_GLOBAL":
        return not isinstance(names.get(str(before.argval)), types.ModuleType)
    return before.opname in (*_OUTSIDE, "BINARY_SUBSCR", "BINARY_OP")


def _tells(before: dis.Instruction, given: tuple[str, ...], names: dict[str, Any]) -> bool:
    """Whether it is the object's own method, a logger's, or a file's: torch.log is none."""
    if before.opname == "LOAD_GLOBAL":
        known = names.get(str(before.argval))
        return not isinstance(known, types.ModuleType) or known.__name__ in ("logging", "wandb")
    return _reads(before, given[:1]) and given[:1] == ("self",)


def _line(step: dis.Instruction) -> int | None:
    positions = step.positions
    return None if positions is None else positions.lineno
