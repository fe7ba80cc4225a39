"""Keep what happened to a run besides its numbers: notices, checkpoints, the best model."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from anytrain.engine.recording.disk import Disk

_MOST_TEXTS = 500
_LONGEST = 4_000
_Show = Callable[..., None]
_listening: weakref.WeakSet[Events] = weakref.WeakSet()
_before: list[_Show] = []
"""How warnings were shown before somebody listened."""


class Events:
    """A file of events: `time`, `step`, `kind` and what belongs to that kind.

    While it listens, each warning that Python shows is an event too, whoever gives it; the same
    text is written once, and how often it came at the end.
    """

    def __init__(self, path: Path, step: Callable[[], int], disk: Disk | None = None) -> None:
        self.path = path
        self._step = step
        self._disk = disk or Disk()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def tell(self, kind: str, **values: Any) -> None:
        """Write an event down."""
        place = {"time": round(time.time(), 3), "step": self._step(), "kind": kind}
        self._disk.append(self.path, {**place, **values})

    def listen(self) -> None:
        """Write warnings down from here on."""
        self._counts.clear()
        self._process = os.getpid()
        _listening.add(self)
        if not _is_installed():
            _before[:] = [warnings.showwarning]
            warnings.showwarning = _show

    def rest(self) -> None:
        """Listen no more; say how often each warning came that came more than once."""
        _listening.discard(self)
        if not _listening and _is_installed():
            warnings.showwarning = _before[0]
        for (category, text), count in self._counts.items():
            if count > 1:
                self.tell("notice", text=text, category=category, count=count)
        self._counts.clear()

    def hear(self, category: str, text: str) -> None:
        """Take a warning; only the first of its kind is written now."""
        if os.getpid() != self._process:  # a forked worker's
            return
        text = text[:_LONGEST]
        with self._lock:
            is_known = (category, text) in self._counts
            if not is_known and len(self._counts) >= _MOST_TEXTS:
                return
            self._counts[category, text] += 1
        if not is_known:
            self.tell("notice", text=text, category=category)


def _is_installed() -> bool:
    return warnings.showwarning is _show


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning as it was shown before, and let every record know.

    Where somebody else has put a function of their own in this one's place, theirs counts; it
    comes back when theirs goes.
    """
    _before[0](message, category, filename, lineno, file, line)
    for events in list(_listening):
        events.hear(category.__name__, str(message))
