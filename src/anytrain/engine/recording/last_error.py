"""Let a run's record say how it ended where a loop of the user's own ends by an error."""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from anytrain.engine.recording.origin import scrubbed
from anytrain.machine.processes.last_words import is_peer_lost

_LONGEST = 300


class Ends(Protocol):
    """What is told how its run has ended."""

    def end(self, how: str, error: BaseException | None = None) -> None:
        """Say how the run ended."""


_told: weakref.WeakKeyDictionary[Ends, int] = weakref.WeakKeyDictionary()
"""Runs, each with its process: a fork's errors are not those of its parent's run."""
_has_hook: list[bool] = []


def tell_of_errors(run: Ends) -> None:
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


def in_words(error: BaseException) -> str:
    """Return an error's kind and first line, without secrets."""
    lines = str(error).strip().splitlines()
    told = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return scrubbed(told)[:_LONGEST]


def is_cause(error: BaseException) -> bool:
    """Whether an error is this process's own, and not that of another rank's end."""
    return not is_peer_lost(error)
