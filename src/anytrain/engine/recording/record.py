"""What a run keeps of itself in its folder besides its times: its start, its log, its events.

The log is one JSON object a line, appended and never rewritten. Each life of a run that goes on
where another was says so with a marker; the reader of `core.records` makes one history of them all.
Events are what happened besides: notices, checkpoints, the best model.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from anytrain.core.documents import as_file, parse
from anytrain.core.errors import NotAFile
from anytrain.core.records import EVENTS, FORMAT, LOADED, LOGGED, METRICS, RUN
from anytrain.engine.recording import origin
from anytrain.engine.recording.disk import Disk, in_text
from anytrain.engine.recording.origin import scrubbed

_MOST_STARTS = 200
"""A run that is restarted for ever keeps the newest: 7 kB each."""
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
