"""What of transformers is replaced as long as a run lasts; see core/patches.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from anytrain.engine.assemble.fast_room import fast_room
from anytrain.engine.assemble.session import Session
from anytrain.engine.prepared.model import values_unread


@contextmanager
def replacements(session: Session) -> Iterator[None]:
    """Replace in the block what models compute better otherwise on the session's device."""
    room = fast_room() if session.device.type == "cuda" else None
    with ExitStack() as put_back:
        if session.end_step is not None:
            put_back.enter_context(values_unread(session.device.type))
        if room is not None:
            put_back.enter_context(room.attend_quickly(session.device))
        yield
