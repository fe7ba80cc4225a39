"""What a run keeps of itself in its folder besides its times: its start, its log, its events."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from anytrain.core.documents import as_file, parse
from anytrain.core.errors import NotAFile
from anytrain.core.records import EVENTS, FORMAT, METRICS, RUN
from anytrain.engine.recording import origin
from anytrain.engine.recording.disk import Disk
from anytrain.engine.recording.events import Events
from anytrain.engine.recording.journal import Journal

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
