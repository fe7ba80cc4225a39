"""Which operations wait for a GPU by themselves: their code reads a value back on the host.

torch's pages on linear algebra name them; the variants that end in `_ex` leave the look to the
caller, and do not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten: Any = torch.ops.aten


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say that whether it worked is looked at."""
    return "success"


def _without_a_range(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say that the least and the largest value are looked at, where none are given."""
    least, most = ((*args, *(0, 0))[2:4]) if len(args) > 2 else (0, 0)
    return "range" if kwargs.get("min", least) == kwargs.get("max", most) else ""


_WAITS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], str]] = {
    aten._linalg_check_errors.default: _always,
    aten._linalg_eigh.default: _always,
    aten._linalg_eigvals.default: _always,
    aten._linalg_svd.default: _always,
    aten.linalg_eig.default: _always,
    aten.linalg_eigvals.default: _always,
    aten.linalg_lstsq.default: _always,
    aten.linalg_pinv.atol_rtol_tensor: _always,
    aten.histc.default: _without_a_range,
}


def wait_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what an operation's own code reads on the host, on CUDA; "" where it reads nothing."""
    find = _WAITS.get(func)
    return "" if find is None else find(args, kwargs)
