"""Whether a model's own code makes calls that all ranks must make together."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from anytrain.core import bytecode

_LIBRARIES = ("torch", "transformers", "anytrain", "peft", "numpy")
_THEIRS = "torch.distributed"
_DEPTH = 3


def meets_other_ranks(model: nn.Module) -> bool:
    """Whether code of the model's that is no library's uses torch.distributed.

    Such a model gathers what all ranks compute: they must have batches of one shape.
    """
    kinds: set[Any] = {type(module) for module in model.modules()}
    return any(_uses(kind, _DEPTH) for kind in kinds)


@lru_cache(maxsize=1024)
def _uses(thing: Any, depth: int) -> bool:
    """Whether a class or a function of the user's, or one that it calls, uses torch.distributed."""
    if depth == 0 or str(thing.__module__).partition(".")[0] in _LIBRARIES:
        return False
    functions = vars(thing).values() if isinstance(thing, type) else [thing]
    return any(_is_theirs(value) or _goes_on(value, depth) for value in _named(functions))


def _named(functions: Any) -> Iterator[Any]:
    """Yield what functions name of their module's, and `torch.distributed` where it is spelled."""
    for each in functions:
        plain = getattr(each, "__func__", each)
        if not isinstance(plain, types.FunctionType):
            continue
        for name in bytecode.names(plain):
            if name in plain.__globals__:
                yield plain.__globals__[name]
            elif name == "distributed":  # torch.distributed.all_gather(...)
                yield _THEIRS


def _is_theirs(value: Any) -> bool:
    is_module = isinstance(value, types.ModuleType)
    home = (
        value
        if isinstance(value, str)
        else getattr(value, "__name__" if is_module else "__module__", None)
    )
    return str(home).startswith(_THEIRS)


def _goes_on(value: Any, depth: int) -> bool:
    return isinstance(value, (types.FunctionType, type)) and _uses(value, depth - 1)
