"""Loading workers that outlive a signal meant for the process they load for.

A Ctrl-C in a terminal, and a scheduler's SIGTERM, reach the workers too. Were they to die at once,
the step that should still be finished and saved would fail for want of a batch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

PATIENCE_S = 60


class PatientWorker:
    """A worker's first call: leave Ctrl-C to the main process, and SIGTERM for a while."""

    def __init__(self, first: Callable[[int], None] | None) -> None:
        self.first = first

    def __call__(self, worker: int) -> None:
        """Set the worker up, then do what the user wanted done first."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _leave_later)
        if self.first is not None:
            self.first(worker)


def _leave_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(PATIENCE_S)
