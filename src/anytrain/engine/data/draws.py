"""Tell from its bytecode that a user's function draws no random number.

Only what is surely so counts: names and methods that are known, plain data, and functions that
are read in the same way. Anything else may draw, and is seeded sample by sample.
"""

from __future__ import annotations

import builtins
import dis
import math
import operator
import types
from typing import Any

import numpy as np
import torch

from anytrain.core import bytecode

_DEPTH = 3
_MODULES = (torch, np, math, operator, torch.nn.functional)
_DATA = (torch.Tensor, np.ndarray, list, tuple, dict, str, bytes, int, float, bool, range)
_BUILTIN_NAMES = """
len range zip max min int float str list dict tuple set enumerate sum sorted isinstance bool abs
round map filter all any slice reversed
"""
_METHOD_NAMES = """
keys values items get append extend pop copy update index count join split strip lower to float long
int half double bool cpu numpy tolist item view reshape size shape dim ndim unsqueeze squeeze
transpose permute contiguous flatten expand clone detach type astype dtype device T sum mean max min
any all pad setdefault clamp abs masked_fill fill_ copy_ narrow chunk new_zeros new_ones new_full
new_tensor
"""
_DRAWING_WORDS = """
rand shuffle choice sample normal uniform bernoulli dropout multinomial permutation seed generator
poisson exponential cauchy
"""
_BUILTINS = frozenset(getattr(builtins, name) for name in _BUILTIN_NAMES.split())
_METHODS = frozenset(_METHOD_NAMES.split())
_DRAWING = tuple(_DRAWING_WORDS.split())


def draws_nothing(function: Any, owner: Any = None, depth: int = _DEPTH) -> bool:
    """Whether a function, or a method of `owner`, surely draws no random number."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or depth == 0:
        return False
    around = bytecode.enclosed(function)
    return all(
        _is_safe(step, before, function, around, owner, depth)
        for before, step in bytecode.steps(function)
    )


def _is_safe(
    step: dis.Instruction,
    before: dis.Instruction | None,
    function: types.FunctionType,
    around: dict[str, Any],
    owner: Any,
    depth: int,
) -> bool:
    name = str(step.argval)
    if step.opname.startswith("IMPORT") or step.opname == "LOAD_BUILD_CLASS":
        return False
    if bytecode.is_global(step):
        value = function.__globals__.get(name, getattr(builtins, name, None))
        return _is_known(value, depth)
    if step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in function.__code__.co_freevars:
        return name in around and _is_known(around[name], depth)
    if bytecode.is_attribute(step):
        return _is_safe_attribute(name, before, function, owner, depth)
    return True


def _is_safe_attribute(
    name: str,
    before: dis.Instruction | None,
    function: types.FunctionType,
    owner: Any,
    depth: int,
) -> bool:
    if any(word in name for word in _DRAWING):
        return False
    first = function.__code__.co_varnames[:1]
    if owner is not None and before is not None and bytecode.loads(before, first):
        found = getattr(type(owner), name, None)
        if isinstance(found, types.FunctionType):
            return draws_nothing(found, owner, depth - 1)
        return not isinstance(found, property) and _is_data(getattr(owner, name, None))
    if before is not None and before.opname == "LOAD_GLOBAL":
        value = function.__globals__.get(str(before.argval))
        if any(value is module for module in _MODULES):
            return not isinstance(getattr(value, name, None), types.ModuleType)
    return name in _METHODS


def _is_known(value: Any, depth: int) -> bool:
    if any(value is module for module in _MODULES) or _is_data(value):
        return True
    if isinstance(value, types.FunctionType):
        return _is_torchs(value) or draws_nothing(value, None, depth - 1)
    return isinstance(value, (type, types.BuiltinFunctionType)) and value in _BUILTINS


def _is_torchs(function: types.FunctionType) -> bool:
    """Whether it is a function of torch's or numpy's whose name does not speak of drawing."""
    ours = function.__module__.split(".")[0] in ("torch", "numpy")
    return ours and not any(word in function.__name__ for word in _DRAWING)


def _is_data(value: Any) -> bool:
    return value is None or isinstance(value, torch.dtype) or type(value) in _DATA
