"""What a run keeps of itself in its folder besides its times: its start, its log, its events.

The log is one JSON object a line, appended and never rewritten. Each life of a run that goes on
where another was says so with a marker; the reader of `core.records` makes one history of them all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from anytrain.core.documents import as_file, parse
from anytrain.core.errors import NotAFile
from anytrain.core.records import EVENTS, FORMAT, LOADED, LOGGED, METRICS, RUN
from anytrain.engine.recording import origin
from anytrain.engine.recording.disk import Disk
from anytrain.engine.recording.events import Events

_MOST_STARTS = 200
"""A run that is restarted for ever keeps the newest: 7 kB each."""


class Record:
    """One run's record; only the main rank's writes. Nothing that fails here stops the run."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        is_main: bool = True,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        self.folder = Path(folder)
        self._is_main = is_main
        self._disk = Disk()
        self._git = origin.Git()
        self._start: dict[str, Any] | None = None
        self._name = ""
        self._since: float | None = None
        """When the first entry came that is logged before a training."""
        self._events = Events(self.folder / EVENTS, step, self._disk)
        self.journal = Journal(self.folder / METRICS, is_main, self._disk)

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, (self.folder,)  # a copy writes nothing until it begins a run of its own

    @property
    def has_begun(self) -> bool:
        """Whether a run is being recorded."""
        return self._start is not None

    def begin(
        self,
        facts: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        name: str | None = None,
        step: int | None = 0,
    ) -> None:
        """Write down that a run starts here, and what is known of it; hear its warnings.

        From step 0 nothing counts that was there before, but for what this record logged already.
        None: `count_from` says it later, if at all.
        """
        if self.has_begun or not self._is_main:
            return
        now = round(time.time(), 3)
        since, self._since = self._since or now, None
        self._start = {"time": now, "since": since}
        if step is not None:
            self._start["step"] = step
        self._name = name or ""
        with self._disk.harmless(f"describe the run for {self.folder / RUN}"):
            self._start |= {**origin.here(), "time": now}
            self._start |= facts() if callable(facts) else facts
        with self._disk.harmless(f"write {self.folder / RUN}"):
            self._write_start(is_new=True)
            self._git.ask()
        if step == 0:
            self._events.begin_anew()
        self._events.listen()

    def count_from(self, step: int) -> None:
        """Say which step this start goes on from."""
        if self._start is not None:
            self._start["step"] = step
            with self._disk.harmless(f"write {self.folder / RUN}"):
                self._write_start()
            if step == 0:
                self._events.begin_anew(self._start["since"])

    def harmless(self) -> AbstractContextManager[None]:
        """Return what a door makes a record's entries in: what fails is told once, not raised."""
        return self._disk.harmless(f"write {self.journal.path}")

    def tell(self, kind: str, **values: Any) -> None:
        """Write down something that happened, if a run is being recorded."""
        if self.has_begun:
            self._events.tell(kind, **values)

    def log(
        self,
        step: int,
        epoch: float | None,
        values: Mapping[str, Any],
        *,
        needs_training: bool = False,
        event: str | None = None,
        of: str | None = None,
    ) -> None:
        """Add an entry to the log; see `Journal.write`."""
        if not self.has_begun:
            self._since = self._since or round(time.time(), 3)
        with self._disk.harmless(f"write {self.journal.path}"):
            self.journal.write(
                step, epoch, values, needs_training=needs_training, event=event, of=of
            )
            self._take_git()

    def end(self) -> None:
        """Take down what is still to come; the run is over."""
        if self.has_begun:
            with self._disk.harmless(f"write {self.folder / RUN}"):
                self._take_git(wait=True)
                if self._start is not None:
                    self._start["ended"] = round(time.time(), 3)
                    self._write_start()
            self._events.rest()
            self._start = None

    def _take_git(self, *, wait: bool = False) -> None:
        if self._start is not None and (said := self._git.answer(wait=wait)) is not None:
            self._start["git"] = said
            self._write_start()

    def _write_start(self, *, is_new: bool = False) -> None:
        """Put this start into run.json, among the others; other things in it stay."""
        path = self.folder / RUN
        try:
            kept = parse(as_file(path).read_bytes())
        except NotAFile:
            raise
        except OSError:
            kept = {}
        found = kept.get("starts")
        starts = found if isinstance(found, list) else []
        earlier = starts if is_new else [one for one in starts if not self._is_this(one)]
        name = self._name or kept.get("name") or self.folder.resolve().name
        self._disk.replace(
            path,
            {
                **kept,
                "format": FORMAT,
                "name": name,
                "starts": [*earlier, self._start][-_MOST_STARTS:],
            },
        )

    def _is_this(self, start: Any) -> bool:
        own = self._start or {}
        names = ("time", "pid", "host")
        return isinstance(start, dict) and all(start.get(n) == own.get(n) for n in names)


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
