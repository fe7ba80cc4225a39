"""Keep what happened to a run besides its numbers: notices, checkpoints, the best model.

And hear of the error that ends a loop of the user's own, which nobody else would write down.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from anytrain.engine.recording.disk import Disk, in_text
from anytrain.engine.recording.origin import scrubbed

_MOST_TEXTS = 500
_LONGEST = 4_000
_Show = Callable[..., None]
_listening: weakref.WeakSet[Events] = weakref.WeakSet()
_ours: list[tuple[_Show, _Show]] = []
"""What shows warnings while somebody listens, and what showed them before."""
_thread = threading.local()
_LONGEST_ERROR = 300
_told: weakref.WeakKeyDictionary[Ends, int] = weakref.WeakKeyDictionary()
"""Runs, each with its process: a fork's errors are not those of its parent's run."""
_has_hook: list[bool] = []


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
        with self._disk.harmless(f"write {self.path}"):
            place = {"time": round(time.time(), 3), "step": self._step(), "kind": kind}
            self._disk.append(self.path, {**place, **values})

    def begin_anew(self, since: float | None = None) -> None:
        """Say that a run begins here: what was told before (that time) is another one's."""
        with self._disk.harmless(f"write {self.path}"):
            if self.path.exists():
                place = {"step": 0, "time": round(time.time(), 3)}
                self._disk.append(self.path, {**place, "event": "begin", "since": since})

    def listen(self) -> None:
        self._counts.clear()
        self._process = os.getpid()
        _listening.add(self)
        if not _is_installed():
            before = warnings.showwarning
            _ours[:] = [(_telling(before), before)]
            warnings.showwarning = _ours[0][0]

    def rest(self) -> None:
        """Listen no more; say how often each warning came that came more than once."""
        _listening.discard(self)
        if not _listening and _is_installed():
            warnings.showwarning = _ours.pop()[1]
        for (category, text), count in self._counts.items():
            if count > 1:
                self.tell("notice", text=text, category=category, count=count)
        self._counts.clear()

    def hear(self, category: str, text: str) -> None:
        """Take a warning; only the first of its kind is written now."""
        if os.getpid() != self._process:  # a forked worker's
            return
        text = scrubbed(text[: 2 * _LONGEST])[:_LONGEST]
        with self._lock:
            is_known = (category, text) in self._counts
            if not is_known and len(self._counts) >= _MOST_TEXTS:
                return
            self._counts[category, text] += 1
        if not is_known:
            self.tell("notice", text=text, category=category)


def _is_installed() -> bool:
    return bool(_ours) and warnings.showwarning is _ours[0][0]


def _telling(before: _Show) -> _Show:
    """Return what shows a warning as it was shown before, and lets every record know.

    Somebody else may put a function of their own in its place, around it or instead of it: then
    theirs counts, and what they pass on is told once.
    """

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        is_inside, _thread.is_showing = getattr(_thread, "is_showing", False), True
        try:
            before(message, category, filename, lineno, file, line)
            if not is_inside:
                for events in list(_listening):
                    events.hear(category.__name__, in_text(message))
        finally:
            _thread.is_showing = is_inside

    return show


class Ends(Protocol):
    """What is told how its run has ended."""

    def end(self, how: str, error: BaseException | None = None) -> None:
        """Say how the run ended."""


def listen_for_errors(run: Ends) -> None:
    """From now on, let this run know of an error that nobody caught, before anybody shows it.

    Whoever shows it may be ended while it does so: a rank that waits for its launcher.
    """
    _told[run] = os.getpid()
    if _has_hook:
        return
    _has_hook.append(True)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(Exception):  # the error is what must be shown
            how = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            for each in [run for run, pid in _told.items() if pid == os.getpid()]:
                each.end(how, error)
        previous(kind, error, trace)

    sys.excepthook = hook


def error_line(error: BaseException) -> str:
    """Return an error's kind and first line, without secrets."""
    lines = str(error).strip().splitlines()
    told = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return scrubbed(told)[:_LONGEST_ERROR]
