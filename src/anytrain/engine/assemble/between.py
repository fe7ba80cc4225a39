"""What may happen between two steps: a save behind the loop ends, a signal has come."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from typing import Any

from anytrain.core.errors import Notice
from anytrain.engine import checkpoint
from anytrain.engine.assemble.session import Session
from anytrain.engine.interrupts import Interrupts
from anytrain.engine.recording.record import Record
from anytrain.engine.recording.timesheet import Timesheet


class BetweenSteps:
    """What looks after a run between its steps."""

    def __init__(self) -> None:
        self.writer: checkpoint.Writer | None = None
        self.interrupts: Interrupts | None = None
        self.timesheet: Timesheet | None = None
        self.record: Record | None = None
        self.unsaved: checkpoint.SaveFailed | None = None
        """The last save, where it failed."""
        self.opening: Callable[[], None] | None = None
        """What the first batch, update or log of a run begins with, once."""

    def __reduce__(self) -> tuple[Any, ...]:
        return BetweenSteps, ()  # a pickled run neither writes nor listens for signals

    def arm(self) -> None:
        """Begin to count the time, and to listen for signals where there is a place to save."""
        self.open()
        if self.timesheet is not None:
            self.timesheet.start(ends_at_exit=True)
        if self.interrupts is not None:
            self.interrupts.arm()

    def open(self) -> None:
        """Begin the run's record, once."""
        opening, self.opening = self.opening, None
        if opening is not None:
            opening()

    def boundary(self) -> None:
        """Tell how a save behind the loop went; leave, if a signal asks for it."""
        if self.timesheet is not None:
            self.timesheet.note()
        if self.writer is not None:
            self.told(self.writer.poll())
        if self.interrupts is not None:
            self.interrupts.boundary()

    def disarm(self) -> None:
        """Give the signals back: the run is over."""
        if self.timesheet is not None:
            self.timesheet.end("finished")
        if self.record is not None:
            self.record.end()
        if self.interrupts is not None:
            self.interrupts.disarm()

    def end(self) -> None:
        """Give the signals back; one that no step was left for does what it does by itself."""
        if self.interrupts is not None:
            self.interrupts.hand_back()

    def finish(self) -> None:
        """Wait until a save behind the loop is committed, and tell if it failed."""
        if self.writer is not None:
            for outcome in self.writer.finish():
                self.told(outcome)

    def told(self, outcome: checkpoint.Saved | checkpoint.SaveFailed | None) -> bool:
        """Put a save on record, and give notice of one that failed; return whether it did."""
        if isinstance(outcome, checkpoint.SaveFailed):
            self.unsaved = outcome
            warnings.warn(str(outcome), Notice, stacklevel=3)
            return True
        if outcome is not None:
            self.unsaved = None
        if outcome is not None and self.record is not None:
            took = {"bytes": outcome.num_bytes, "seconds": round(outcome.seconds, 3)}
            self.record.tell("checkpoint", path=str(outcome.path), step=outcome.step, **took)
            for path in outcome.removed:
                self.record.tell("removed", path=str(path))
        return False


def stop_on_signals(session: Session, save: Callable[[], str]) -> Interrupts:
    """Return what saves the run and ends it between two steps when a signal asks for it."""
    cursor = session.cursor
    return Interrupts(
        session.world,
        save,
        lambda: cursor.loader is not None,
        signals=tuple(signal.Signals[name] for name in session.environment.stop_signals),
        beats=session.environment.beats,
    )
