"""Add what the vendor's file knows to an error that nobody caught."""

from __future__ import annotations

import sys
from types import TracebackType

from anytrain.machine.backends.base import Backend

_explained: set[str] = set()


def explain_uncaught(backend: Backend) -> None:
    """From now on, show the backend's explanation below an uncaught error's traceback."""
    if backend.name in _explained:
        return
    _explained.add(backend.name)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = backend.explain(error)
        if words:
            error.add_note(words)
        previous(kind, error, trace)

    sys.excepthook = hook
