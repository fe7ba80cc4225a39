"""The one slot that holds the live session.

`PartialState()`, `get_logger` and `tqdm` mean "the current one" by contract. A new run replaces
it; `end_training` clears it. Only the doors read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytrain.engine.assemble.session import Session

_slot: list[Session] = []


def get() -> Session | None:
    """Return the live session, or None."""
    return _slot[0] if _slot else None


def take(session: Session) -> None:
    """Make this the live session."""
    _slot[:] = [session]


def clear() -> None:
    """Forget the live session."""
    _slot.clear()
