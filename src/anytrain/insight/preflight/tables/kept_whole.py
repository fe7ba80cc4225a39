"""Composed operations that mps takes whole, and every other device takes apart.

`linalg_svd` decomposes into `_linalg_svd` before a tracer on another device can see it. On mps,
some versions of torch have it registered as a whole (it is sent to the CPU), while svdvals, cond,
the nuclear norm and matrix_rank go to `_linalg_svd` directly, which is missing. A tracer that
installs this sees the first by its own name.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_within: ContextVar[str] = ContextVar("within", default="")


def install(library: torch.library.Library, keys: Iterable[str]) -> None:
    """Mark calls that are kept whole, for tensors of these dispatch keys.

    They are computed as before; `name` tells of them while they are.
    """
    for key in keys:
        library.impl("linalg_svd", _linalg_svd, key)


def name(leaf: str) -> str:
    """Return the name by which mps would meet a leaf operation.

    >>> name("_linalg_svd")
    '_linalg_svd'
    """
    return _within.get() or leaf


def _linalg_svd(a: Any, full_matrices: bool = True, *, driver: str | None = None) -> Any:
    import torch

    before = _within.set("linalg_svd")
    try:
        return torch.ops.aten._linalg_svd(a, full_matrices, True, driver=driver)
    finally:
        _within.reset(before)
