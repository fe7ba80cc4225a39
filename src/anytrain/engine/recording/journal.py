"""Keep a run's log as one JSON object a line, appended and never rewritten.

Each life of a run that goes on where another was says so with a marker; the reader of
`core.records` makes one history of them all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anytrain.core.records import LOADED, LOGGED
from anytrain.engine.recording.disk import Disk


class Journal:
    """A file of log entries: `step`, `epoch`, `time` (seconds since 1970) and the values.

    Each entry is written through at once. NaN and infinities are the strings that `float()`
    reads. A disk that fails is told of once, and stops nothing. Only the main rank writes.
    """

    def __init__(
        self, path: str | os.PathLike[str], is_main: bool = True, disk: Disk | None = None
    ) -> None:
        self.path = Path(path)
        self._is_main = is_main
        self._disk = disk or Disk()
        self._has_begun = self._is_alone = False
        self._num_before = 0
        """Entries of this process that came before its training."""

    @property
    def has_begun(self) -> bool:
        """Whether a training is being written down."""
        return self._has_begun

    def begin(self, step: int) -> None:
        """Go on from `step`: what earlier lives wrote beyond it is not read any more.

        From step 0 nothing earlier is, but for what this journal itself wrote before: figures of
        the untrained model. A file that holds nothing else needs no marker.
        """
        prelude, self._num_before = self._num_before, 0
        is_first, self._has_begun = not self._has_begun, True
        if not self._is_main or (is_first and (self._is_alone or not _holds_some(self.path))):
            return
        self._mark(step, prelude=prelude)

    def go_on(self, step: int, of: str) -> None:
        """Go on from `step` with one kind of entries: those that are logged, or losses unasked.

        A loop of the user's own may count them in different steps.
        """
        prelude = 0
        if of == LOGGED:
            prelude, self._num_before = self._num_before, 0
            self._has_begun = True
        if self._is_main and _holds_some(self.path):
            self._mark(step, prelude=prelude, of=of)

    def _mark(self, step: int, **more: Any) -> None:
        told = {"step": step, "time": round(time.time(), 3), "event": "begin", **more}
        self._disk.append(self.path, told)

    def write(
        self,
        step: int,
        epoch: float | None,
        values: Mapping[str, Any],
        *,
        needs_training: bool = False,
        event: str | None = None,
        of: str | None = None,
    ) -> None:
        """Add an entry; `event` says of one that nobody logged what it is.

        `of` names the weights that an evaluation was of where they are not that step's.

        With `needs_training`, one that comes before a training, among another process's entries,
        has no step and is no part of their history, unless a training follows in this process.
        """
        if not self._is_main:
            return
        if not self._has_begun and event is None:
            self._is_alone |= not self._num_before and not _holds_some(self.path)
            self._num_before += 1
        place: dict[str, Any] = {"step": step, "epoch": epoch, "time": round(time.time(), 3)}
        if event is not None:
            place |= {"event": event}
        is_aside = needs_training and not (self._has_begun or self._is_alone)
        if is_aside:
            place |= {"step": None, "event": "evaluation"}
        elif of is not None:
            place |= {"event": LOADED, "of": of}
        taken = {*place, "event"}
        # A value of the user's by one of these names is kept under another.
        rest = {f"{n}_" if n in taken else n: v for n, v in values.items() if n != "epoch"}
        self._disk.append(self.path, {**place, **rest})


def _holds_some(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
