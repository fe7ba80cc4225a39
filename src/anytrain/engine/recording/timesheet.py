"""Write down where a run's time goes, as it goes, so that a killed run can tell too."""

from __future__ import annotations

import atexit
import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from anytrain.core.clock import Ledger
from anytrain.core.notices import give_notice
from anytrain.core.records import TIMESHEET, Life
from anytrain.engine.recording.disk import append, reason, to_json
from anytrain.engine.recording.record import error_line, listen_for_errors
from anytrain.machine.processes.error_hooks import is_peer_lost

# A line a second, and later one for each hundredth of the time so far: a day makes 700 lines.
_LEAST_S = 1.0
_SHARE = 0.01

Facts = Callable[[], Mapping[str, Any]]


class Timesheet:
    """A run's ledger, written to its folder now and then.

    Only the main rank has one that writes. A disk that fails is told of once, and stops nothing.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        ledger: Ledger,
        *,
        begin: Facts,
        standing: Facts,
        rank: int = 0,
    ) -> None:
        self.path = Path(folder) / TIMESHEET
        self._ledger = ledger
        self._begin, self._standing = begin, standing
        self._rank, self._is_main = rank, rank == 0
        self._has_started = self._has_begun = self._has_complained = False
        self._how: str | None = None
        self._error: str | None = None
        self._at_exit = "ended"
        self._num_revisions = 0
        self._started = perf_counter()
        self._due = self._started

    def start(self, *, ends_at_exit: bool = False) -> None:
        """Begin the run, once; one that never says when it is over ends with its process."""
        if not self._has_started:
            self._has_started = True
            self._ledger.begin()
            if ends_at_exit:
                atexit.register(_end, weakref.ref(self))
                listen_for_errors(self)

    def end(self, how: str, error: BaseException | None = None) -> None:
        """Say how the run ended, if it began and has not ended yet; and by which error.

        Another rank than the main one says what failed in it: the main one may not come to it.
        """
        if not self._has_started or self._how is not None or self.was_removed():
            return
        if error is not None and how == "failed":
            self._error = error_line(error)
            if not self._is_main and not is_peer_lost(error):
                self._tell_failure()
        if self._is_main:
            self.write(how)
        self._how = how

    def _tell_failure(self) -> None:
        """Add to the main rank's record that this rank has failed, where that record is here."""
        now = self._standing()
        with suppress(OSError):
            if now.get("step") and self.path.is_file():
                told = {"kind": "failed", "time": round(time.time(), 3), "step": now["step"]}
                append(self.path, to_json({**told, "rank": self._rank, "error": self._error}))

    def leave(self) -> None:
        """Take note that a signal ends the process now, between two steps."""
        self._at_exit = "stopped"

    def was_removed(self) -> bool:
        """Whether somebody has removed the run's folder, as scripts do with a temporary one."""
        return self._has_begun and not self.path.parent.is_dir()

    @property
    def due(self) -> float:
        """When it is time to write again, by perf_counter."""
        return self._due if self._is_main else math.inf

    def note(self) -> None:
        """Write how things stand, if it is time to."""
        if perf_counter() >= self.due:
            self.write()

    def write(self, how: str | None = None) -> None:
        """Write how things stand now; `how` says how the run has ended, once it has."""
        if not self._is_main:
            return
        self._how = how or self._how
        try:
            self._add()
        except Exception as error:  # noqa: BLE001  the record of a run never stops it
            self._complain(error)
        now = perf_counter()
        self._due = now + max(_LEAST_S, (now - self._started) * _SHARE)

    def _add(self) -> None:
        entry = {"kind": "time", **self._now()}
        if self._how is not None:
            entry |= {"kind": "end", "how": self._how}
            entry |= {} if self._error is None else {"error": self._error}
        revisions = entry.pop("revisions", [])
        entry["revisions"] = revisions[self._num_revisions :]
        if not self._has_begun:
            self._open()
        append(self.path, to_json(entry))
        self._num_revisions = len(revisions)

    def seconds_since_start(self) -> float:
        """Return the wall time of the run without its start."""
        return sum(s for name, s in self._ledger.totals().items() if name != "start")

    def life(self) -> Life:
        """Return what a reader of the record would know now."""
        last = self._now()
        return Life(dict(self._begin()), last, last.pop("revisions", []))

    def _now(self) -> dict[str, Any]:
        return {
            "time": round(time.time(), 3),
            "cpu_seconds": round(time.process_time(), 3),
            "seconds": {name: round(s, 6) for name, s in self._ledger.totals().items()},
            "hidden": round(self._ledger.hidden, 6),
            **self._standing(),
        }

    def _open(self) -> None:
        """Begin a life."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        here = {
            "kind": "begin",
            "time": round(time.time(), 3),
            "cpu_seconds": round(time.process_time(), 3),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        append(self.path, to_json({**here, **self._begin()}))
        self._has_begun = True

    def _complain(self, error: Exception) -> None:
        if not self._has_complained:
            self._has_complained = True
            give_notice(
                f"Cannot write {self.path}: {reason(error)}. Training goes on; `anytrain why` "
                "may know less of it.",
                stacklevel=4,
            )


def _end(sheet: weakref.ref[Timesheet]) -> None:
    found = sheet()
    if found is not None:
        found.end(found._at_exit)
