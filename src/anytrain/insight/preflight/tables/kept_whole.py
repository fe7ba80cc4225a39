"""Composed operations that mps takes whole, and every other device takes apart.

`linalg_svd` decomposes into `_linalg_svd` before a tracer on another device can see it. On mps,
some versions of torch have it registered as a whole (it is sent to the CPU), while svdvals, cond,
the nuclear norm and matrix_rank go to `_linalg_svd` directly, which is missing. A tracer that
installs this can tell the first from the others.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NONE = (None, None)
_inside: ContextVar[tuple[Any, Any]] = ContextVar("inside", default=_NONE)
"""The leaf that is on its way, and the operation that it is the whole of."""


def install(library: torch.library.Library, key: str) -> None:
    """Notice calls that are kept whole, for tensors of one dispatch key; compute them as before."""
    library.impl("linalg_svd", _linalg_svd, key)


def met(leaf: Any) -> Any:
    """Return the operation that mps would meet in place of a leaf."""
    part, whole = _inside.get()
    return whole if part is leaf else leaf


def _linalg_svd(a: Any, full_matrices: bool = True, *, driver: str | None = None) -> Any:
    import torch

    aten = torch.ops.aten
    before = _inside.set((aten._linalg_svd.default, aten.linalg_svd.default))
    try:
        return aten._linalg_svd(a, full_matrices, True, driver=driver)
    finally:
        _inside.reset(before)
