"""Find what a user's code does besides computing: a recording would do it only once.

It reads bytecode, so it sees what is written, not what is meant. Where it is in doubt it says so,
and the step runs op by op.
"""

from __future__ import annotations

import dis
import linecache
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from anytrain.core import bytecode
from anytrain.fast.purity.lookups import Code, called, roots, written
from anytrain.fast.purity.users import is_library

_KEEPS = frozenset(
    {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popleft", "appendleft"}
)
_TELLS = frozenset({"log", "log_metrics", "info", "warning", "debug", "write", "add_scalar"})
_MOVES = frozenset({"global_step", "current_step", "num_updates", "epoch", "current_epoch"})
_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL"})
_TELLERS = frozenset({"logger", "log", "writer", "tb", "wandb", "tracker"})
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_DEPTH = 3


def impurity(function: Callable[..., Any]) -> str | None:
    """Name the first line that does more than compute; None where there is none to be seen."""
    code = written(function)
    return None if code is None else _first(code, _DEPTH, set())


def model_impurity(model: nn.Module) -> str | None:
    """Name the first line of a model's own classes, or the hook, that does more than compute."""
    hook = hooked(model)
    if hook is not None:
        return hook
    kinds = {type(module): module for module in model.modules()}
    for module in kinds.values():
        code = written(module)
        found = None if code is None else _first(code, _DEPTH, set())
        if found is not None:
            return found
    return None


def hooked(model: nn.Module) -> str | None:
    """Name a hook of the user's on a module or a parameter."""
    for module in model.modules():
        for hook in _hooks(module):
            if not is_library(getattr(hook, "__module__", None) or type(hook).__module__):
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


def _first(code: Code, depth: int, seen: set[Any]) -> str | None:
    function = code.function
    if function in seen:
        return None
    seen.add(function)
    for line, what in (*_findings(function), *_drawn(code)):
        text = linecache.getline(function.__code__.co_filename, line).strip()
        return f"{Path(function.__code__.co_filename).name} line {line} {what} (`{text}`)"
    if depth > 0:
        for other in called(code):
            found = _first(other, depth - 1, seen)
            if found is not None:
                return found
    return None


def _drawn(code: Code) -> Iterator[tuple[int, str]]:
    """Yield what draws from a generator, or takes from an iterator, that only the host has."""
    line = code.function.__code__.co_firstlineno
    takes = "next" in bytecode.globals_of(code.function)
    for root in roots(code):
        value = root.get()
        is_host = isinstance(value, torch.Generator) and value.device.type == "cpu"
        if is_host or isinstance(value, _GENERATORS):
            yield line, f"draws from {root.name!r}, a generator of the host"
        if takes and isinstance(value, Iterator):
            yield line, f"takes the next of {root.name!r}"


def _findings(function: types.FunctionType) -> Iterator[tuple[int, str]]:
    """Yield each line that does more than compute, and what it does."""
    own = function.__code__
    given = own.co_varnames[: own.co_argcount + own.co_kwonlyargcount]
    scope = Scope(given, own.co_freevars, function.__globals__)
    for code in bytecode.codes(function):
        line = code.co_firstlineno
        earlier: list[dis.Instruction] = []
        for step in dis.get_instructions(code):
            line = _line(step) or line
            what = _effect(step, earlier, scope)
            if what is not None:
                yield line, what
            earlier.append(step)


class Scope(NamedTuple):
    """The names of a function, also for what is written inside of it."""

    given: tuple[str, ...]
    free: tuple[str, ...]
    """What was there before the function was called; other enclosed names are its own."""
    known: dict[str, Any]


def _effect(step: dis.Instruction, earlier: list[dis.Instruction], scope: Scope) -> str | None:
    before = earlier[-1] if earlier else None
    if step.opname in _STORES or (step.opname == "STORE_DEREF" and step.argval in scope.free):
        return f"keeps {step.argval!r} for later"
    if step.opname == "STORE_SUBSCR" and _was_there(earlier, _container(earlier), scope):
        return "writes into something that outlives the step"
    if step.opname == "LOAD_GLOBAL" and step.argval == "print" and "print" not in scope.known:
        return "prints"
    if before is None or not bytecode.is_attribute(step):
        return None
    return _called_method(str(step.argval), earlier, scope)


def _container(steps: list[dis.Instruction]) -> int:
    """Return which step ends `container` in `container[key] = value`, or in `... += value`."""
    end = len(steps)
    if steps[-1].opname == "SWAP":  # container and key were loaded once, and copied
        copies = [place for place, step in enumerate(steps) if step.opname == "COPY"]
        end = copies[-2] if len(copies) > 1 else 0
    return _before(steps, end)


def _before(steps: list[dis.Instruction], end: int) -> int:
    """Return which step comes right before those that put one value on top."""
    missing = 1
    while missing > 0 and end > 0:
        end -= 1
        missing -= dis.stack_effect(steps[end].opcode, steps[end].arg, jump=False)
    return end - 1


def _base(steps: list[dis.Instruction], end: int) -> dis.Instruction | None:
    """Return what loads `x` in `x.y[z]`, an expression that ends with this step."""
    while end >= 0:
        step = steps[end]
        if bytecode.is_attribute(step):
            end -= 1
        elif step.opname == "BINARY_SUBSCR" or "[" in step.argrepr:
            end = _before(steps, end)
        else:
            return step
    return None


def _was_there(steps: list[dis.Instruction], end: int, scope: Scope) -> bool:
    """Whether an expression is something from before the call: what an argument holds is."""
    base = _base(steps, end)
    is_held = base is not None and base is not steps[end] and bytecode.loads(base, scope.given)
    return is_held or _is_outside(base, scope)


def _is_outside(step: dis.Instruction | None, scope: Scope) -> bool:
    """Whether a step loads something that was there before the function was called."""
    if step is None:
        return False
    if step.opname == "LOAD_DEREF":
        return step.argval in (*scope.free, *scope.given[:1])
    is_self = scope.given[:1] == ("self",) and bytecode.loads(step, scope.given[:1])
    return is_self or step.opname == "LOAD_GLOBAL"


def _called_method(name: str, earlier: list[dis.Instruction], scope: Scope) -> str | None:
    if name in _MOVES:
        return f"looks at {name!r}, which changes from step to step"
    if name in _KEEPS and _outlives(name, earlier, scope):
        return "adds to something that outlives the step"
    if name in _TELLS and _tells(earlier[-1], scope):
        return "tells somebody"
    return None


def _outlives(name: str, earlier: list[dis.Instruction], scope: Scope) -> bool:
    """Whether what a method is called on was there before the step: no local of the function."""
    base = _base(earlier, len(earlier) - 1)
    if base is not None and base.opname == "LOAD_GLOBAL":
        return not isinstance(scope.known.get(str(base.argval)), types.ModuleType)
    if name == "add":  # tensors have it too, and come as arguments
        return base is not earlier[-1] and _is_outside(base, scope)
    return (
        base is not earlier[-1]
        and _was_there(earlier, len(earlier) - 1, scope)
        or (base is not None and base.opname == "LOAD_DEREF" and _is_outside(base, scope))
    )


def _tells(before: dis.Instruction, scope: Scope) -> bool:
    """Whether it is the object's own method, a logger's, or a file's: torch.log is none."""
    if before.opname == "LOAD_GLOBAL":
        known = scope.known.get(str(before.argval))
        return not isinstance(known, types.ModuleType) or known.__name__ in ("logging", "wandb")
    if before.opname == "LOAD_ATTR":
        return before.argval in _TELLERS
    return bytecode.loads(before, scope.given[:1]) and scope.given[:1] == ("self",)


def _line(step: dis.Instruction) -> int | None:
    positions = step.positions
    return None if positions is None else positions.lineno
