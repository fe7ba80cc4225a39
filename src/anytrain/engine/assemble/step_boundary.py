"""What may happen between two steps: a save behind the loop ends, a signal has come."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.engine import checkpoint
from anytrain.engine.assemble.session import Session
from anytrain.engine.checkpoint import files, locks
from anytrain.engine.interrupts import Interrupted, Interrupts
from anytrain.engine.recording.loss_curve import LossCurve
from anytrain.engine.recording.record import Record
from anytrain.engine.recording.timesheet import Timesheet


class BetweenSteps:
    """What looks after a run between its steps."""

    def __init__(self) -> None:
        self.writer: checkpoint.Writer | None = None
        self.interrupts: Interrupts | None = None
        self.timesheet: Timesheet | None = None
        self.record: Record | None = None
        self.losses: LossCurve | None = None
        """The loss curve of a loop of the user's own."""
        self.unsaved: checkpoint.SaveFailed | None = None
        """The last save, where it failed."""
        self.saved: Path | None = None
        """The last checkpoint that was committed."""
        self.opening: Callable[[], None] | None = None
        """What the first batch, update or log of a run begins with, once."""
        self.next_look = 0.0
        """Until then, by perf_counter, there is nothing to do between two steps; 0: at each."""
        self._claim = ExitStack()

    def __reduce__(self) -> tuple[Any, ...]:
        return BetweenSteps, ()  # a pickled run neither writes nor listens for signals

    def arm(self) -> None:
        """Begin to count the time, and to listen for signals where there is a place to save."""
        self.open()
        self.next_look = 0.0
        if self.timesheet is not None:
            self.timesheet.start(ends_at_exit=True)
        if self.interrupts is not None:
            self.interrupts.arm()

    def open(self) -> None:
        """Begin the run's record, once."""
        opening, self.opening = self.opening, None
        if opening is not None:
            opening()

    def claim(self, root: Path) -> None:
        """Keep a folder to this run until it is over; refuse where another process trains there.

        What started this process, a notebook's kernel whose loop is over, may hold it still.
        """
        try:
            with suppress(OSError):  # a save will tell what is wrong with the folder
                files.make_folders(root)
            self._claim.enter_context(locks.claimed(root))
        except locks.Taken as taken:
            if taken.pid in {parent.pid for parent in psutil.Process().parents()}:
                return
            raise BadInput(
                f"Cannot begin a run in {root}.",
                why=f"{taken.who} trains there at this moment, and each of the two would "
                "overwrite what the other saves.",
                fix="choose another project_dir, or wait until that run has ended (`anytrain watch "
                f"{root}` shows it).",
            ) from None

    def let_go(self) -> None:
        """Leave the folder to others."""
        self._claim.close()

    def boundary(self) -> None:
        """Tell how a save behind the loop went; leave, if a signal asks for it."""
        if self.timesheet is not None:
            self.timesheet.note()
        if self.losses is not None:
            self.losses.note()
        if self.writer is not None:
            self.note_outcome(self.writer.poll())
        self.next_look = self._next_look()  # before the signals: one that comes now sets it to 0
        if self.interrupts is not None:
            try:
                self.interrupts.boundary()
            except Interrupted:
                if self.timesheet is not None:
                    self.timesheet.leave()
                raise

    def _next_look(self) -> float:
        """Return when to look again: at each step where ranks count them, or something is due."""
        is_saving = self.writer is not None and not self.writer.is_idle
        counts = self.interrupts is not None and self.interrupts.counts
        if is_saving or counts or self.losses is not None:
            return 0.0
        return math.inf if self.timesheet is None else self.timesheet.due

    def _look_now(self) -> None:
        self.next_look = 0.0

    def begin_save(
        self, writer: checkpoint.Writer, name: str, take: Callable[[Path], checkpoint.Snapshot]
    ) -> None:
        """Begin a save behind the loop; how it went is told between two later steps."""
        self.writer, self.next_look = writer, 0.0
        writer.begin(name, take)

    def stop_on_signals(self, session: Session, save: Callable[[], str]) -> None:
        """Save the run and end it between two steps when a signal asks for it."""
        cursor = session.cursor
        self.interrupts = Interrupts(
            session.world,
            save,
            lambda: cursor.loader is not None,
            signals=tuple(signal.Signals[name] for name in session.environment.stop_signals),
            beats=session.environment.beats,
            wake=self._look_now,
        )

    def disarm(self) -> None:
        """Give the signals back: the run is over."""
        if self.timesheet is not None:
            self.timesheet.end("finished")
        self.close()
        if self.interrupts is not None:
            self.interrupts.disarm()
        self.let_go()

    def close(self) -> None:
        """Take down what is left for the record."""
        if self.losses is not None:
            self.losses.end()
        if self.record is not None:
            self.record.end()

    def end(self) -> None:
        """Give the signals back; one that no step was left for does what it does by itself."""
        if self.interrupts is not None:
            self.interrupts.hand_back()

    def finish(self) -> None:
        """Wait until a save behind the loop is committed, and tell if it failed."""
        if self.writer is not None:
            for outcome in self.writer.finish():
                self.note_outcome(outcome)

    def note_outcome(self, outcome: checkpoint.Saved | checkpoint.SaveFailed | None) -> bool:
        """Record a save, or warn that it failed; return True if it failed."""
        if isinstance(outcome, checkpoint.SaveFailed):
            self.unsaved = outcome
            if self.record is not None and outcome.kind != "nonfinite":
                since = "the beginning" if self.saved is None else self.saved.name
                self.record.tell("unsaved", since=since, why=outcome.why)
            give_notice(str(outcome), stacklevel=3)
            return True
        if outcome is not None:
            self.unsaved, self.saved = None, outcome.path
        if outcome is not None and self.record is not None:
            took = {"bytes": outcome.num_bytes, "seconds": round(outcome.seconds, 3)}
            self.record.tell("checkpoint", path=str(outcome.path), step=outcome.step, **took)
            for path in outcome.removed:
                self.record.tell("removed", path=str(path))
        return False
