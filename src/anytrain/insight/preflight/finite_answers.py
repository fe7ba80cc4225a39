"""Follow what a healthy run would answer to "is it a number?": yes, always.

No data is there to be looked at. A guard such as `if torch.isnan(loss).any(): raise` must not end
the trace, so the answers of such questions are kept with the tensors that hold them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from anytrain.insight.preflight.claimed import NOT_KNOWN, flat, storage_of

_NEVER = ("isnan", "isinf", "isposinf", "isneginf")
_KEEP = frozenset(
    (
        *("any", "all", "sum", "mean", "max", "min", "amax", "amin", "count_nonzero"),
        *("_to_copy", "clone", "copy", "index", "masked_select"),
    )
)
_NOT = ("logical_not", "bitwise_not")
_AND = ("logical_and", "bitwise_and", "__and__", "mul")
_OR = ("logical_or", "bitwise_or", "__or__")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}


def note(func: Any, args: tuple[Any, ...], given: list[torch.Tensor], made: Any) -> None:
    """Keep with an operation's result whether all that is in it is true, or none is."""
    if not made or not made[0].is_meta:
        return
    known = storage_of(made[0])
    if known is None:
        return
    is_view = any(storage_of(tensor) is known for tensor in given)
    if is_view and not func._schema.is_mutable:
        return  # of the same memory
    known.truth = _answer(func, args)


def _answer(func: Any, args: tuple[Any, ...]) -> bool | None:
    name = func._overloadpacket.__name__
    if not name.startswith("__"):
        name = name.removesuffix("_")  # in place
    if name in _NEVER:
        return False
    if name in _COMPARE:
        return _compared(_COMPARE[name], *args[:2])
    truths = [truth_of(tensor) for tensor in flat(args, [])]
    if name in _KEEP:
        return truths[0]
    if name in ("cat", "stack"):
        return truths[0] if len(set(truths)) == 1 else None
    if name in _NOT:
        return None if truths[0] is None else not truths[0]
    if name in _AND and len(truths) == 2:
        return _joined(truths, decisive=False)
    return _joined(truths, decisive=True) if name in _OR and len(truths) == 2 else None


def _joined(truths: list[bool | None], *, decisive: bool) -> bool | None:
    """Return what two truths are together, where one of them alone may decide."""
    if decisive in truths:
        return decisive
    return None if None in truths else not decisive


def _compared(compare: Callable[[Any, Any], bool], one: Any, other: Any) -> bool | None:
    """Compare as values are: a number is equal to itself, is finite, and is 1 unless known."""
    if one is other:
        return compare(1, 1)
    if isinstance(other, torch.Tensor) or not isinstance(one, torch.Tensor):
        return None
    if not math.isfinite(other) or one.numel() == 1:
        return compare(value_of(one), other)
    return None


def value_of(tensor: torch.Tensor) -> Any:
    """Return the value in a tensor: what is known of it, else one."""
    known = storage_of(tensor)
    if known is None or (known.value is NOT_KNOWN and known.truth is None):
        return 1.0
    return float(bool(known.truth)) if known.value is NOT_KNOWN else known.value


def truth_of(tensor: torch.Tensor) -> bool | None:
    """Return whether all that is in a tensor is true, or none is; None where nobody knows."""
    known = storage_of(tensor) if tensor.is_meta else None
    return None if known is None else known.truth
