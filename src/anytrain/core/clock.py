"""The time ledger: where a run's wall time goes.

At each moment exactly one entry is running, so the entries add up to the wall time. A span inside
another one takes its time off the outer one, but for an evaluation or a save: what happens in
these is theirs. Time outside any span is the rest: "start" at first, then "other", or whatever
the ledger is told. A ledger is written by one thread; what other threads do costs the run nothing
until somebody waits for it.
"""

from __future__ import annotations

import os
import sys
import time
from time import perf_counter
from types import TracebackType

from anytrain.core.environment import in_notebook

NAMES = ("start", "data", "transfer", "step", "wait", "evaluate", "save", "record", "other")
"""What the entries mean, in the order they are shown.

start: from the start of the process to the loop. data: waiting for the next batch. transfer: host
to device. step: computing. wait: the host waits for the device, which belongs to the step.
record: compiling, or recording a graph. other: the rest, such as callbacks.
"""
OUTSIDE = "outside"
"""The time after a training, which is the user's own: it is in no share."""
_WHOLE = ("evaluate", "save")
_runs: list[None] = []
"""One for each run that this process has begun."""


class Span:
    """One entry of a ledger; use it with `with`, as often as you like."""

    __slots__ = ("_before", "_ledger", "is_whole", "last", "name", "seconds", "uses")

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._before = 0.0
        self.name = name
        self.is_whole = name in _WHOLE
        """Whether spans inside it are part of it."""
        self.seconds = 0.0
        """Time of the uses that are over, and of the running one up to its last interruption."""
        self.last = 0.0
        """Seconds of the last use, without the spans inside it."""
        self.uses = 0

    def __enter__(self) -> None:
        ledger = self._ledger
        running, now = ledger.running, perf_counter()
        running.seconds += now - ledger.since
        ledger.outer.append(running)
        ledger.since = now
        if not running.is_whole:
            ledger.running = self
        self._before = self.seconds
        self.uses += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ledger = self._ledger
        now = perf_counter()
        ledger.running.seconds += now - ledger.since
        ledger.running, ledger.since = ledger.outer.pop(), now
        self.last = self.seconds - self._before


class Ledger:
    """Seconds of wall time by name; begins when it is made."""

    __slots__ = (
        "_around",
        "_num_walks",
        "_spans",
        "_undecided",
        "hidden",
        "outer",
        "own_loop",
        "running",
        "since",
    )

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}
        self.outer: list[Span] = []
        """What runs on when the running span is over, the innermost last."""
        self.running = self.span("start")
        self.since = perf_counter()
        """When the running span began, or was last looked at."""
        self.hidden = 0.0
        """Seconds of waiting that cost nothing, because the device was still busy."""
        self.own_loop = True
        """Whether the loop is the user's own, and does not name its parts."""
        self._num_walks = 0
        self._around = "other"
        """What the rest is called outside of all walks."""
        self._undecided = 0.0
        """Seconds of walks before the first update: evaluations, if there ever is one."""

    def __reduce__(self) -> tuple[type[Ledger], tuple[()]]:
        return Ledger, ()  # time is measured in one process; a copy begins its own

    def begin(self) -> None:
        """Begin a run: the process's first one began with the process, a second one begins now."""
        if self.span("step").uses:
            for span in self._spans.values():
                span.seconds, span.uses = 0.0, 0
            self.hidden = self._undecided = 0.0
        elif not _runs and not _is_interactive():
            before = _process_age() - sum(self.totals().values())
            self.span("start").seconds += max(before, 0.0)
        _runs.append(None)
        self.rest("start")

    def span(self, name: str) -> Span:
        """Return the span of this name; the same object each time."""
        found = self._spans.get(name)
        if found is None:
            found = self._spans[name] = Span(self, name)
        return found

    def rest(self, name: str) -> str:
        """Call the time outside any span so from now on; return what it was called."""
        span = self.span(name)
        if self.outer:
            before, self.outer[0] = self.outer[0], span
            return before.name
        before, now = self.running, perf_counter()
        before.seconds += now - self.since
        self.running, self.since = span, now
        return before.name

    def enter_walk(self, updates: int) -> tuple[float, int] | None:
        """Take what a loop of the user's own does between two batches for its step."""
        if not self.own_loop or self.outer:
            return None
        before = self.rest("step")
        if not self._num_walks:
            self._around = "other" if before == "start" else before
        self._num_walks += 1
        self._decide(updates)
        return self.span("step").seconds, updates

    def leave_walk(self, entered: tuple[float, int] | None, updates: int) -> None:
        """End what `enter_walk` began; a walk in which nothing was updated was an evaluation.

        Walks of several loaders may be open at once, and end in any order.
        """
        if entered is None:
            return
        seconds, done = entered
        self._num_walks -= 1
        self.rest("step" if self._num_walks else self._around)
        if updates == done:
            step = self.span("step")
            before = min(seconds, step.seconds)  # another walk may have taken its time off
            self._undecided += step.seconds - before
            step.seconds = before
        self._decide(updates)

    def _decide(self, updates: int) -> None:
        """Call walks that updated nothing evaluations, in a loop whose updates are seen here."""
        if updates and self._undecided:
            self.span("evaluate").seconds += self._undecided
            self._undecided = 0.0

    def hide(self, name: str, behind: str = "step") -> None:
        """Give the last use's time to what the device was doing meanwhile: it cost nothing."""
        span = self.span(name)
        seconds, span.last = span.last, 0.0
        span.seconds -= seconds
        self.span(behind).seconds += seconds
        self.hidden += seconds

    def totals(self) -> dict[str, float]:
        """Return the seconds of each name up to now; together they are the run's wall time."""
        now = perf_counter()
        self.running.seconds += now - self.since
        self.since = now
        seconds = {name: s.seconds for name, s in self._spans.items() if s.uses or s.seconds}
        if self._undecided:
            seconds["step"] = seconds.get("step", 0.0) + self._undecided
        seconds.pop(OUTSIDE, None)
        order = dict.fromkeys([*(name for name in NAMES if name in seconds), *seconds])
        return {name: seconds[name] for name in order}

    def shares(self) -> dict[str, float]:
        """Return each name's share of the wall time; together they are 1."""
        totals = self.totals()
        whole = sum(totals.values())
        return {name: seconds / whole if whole else 0.0 for name, seconds in totals.items()}


def _is_interactive() -> bool:
    """Whether a person types into this process: its age says nothing of the run."""
    return hasattr(sys, "ps1") or in_notebook()


def _process_age() -> float:
    """Return the seconds since this process was started."""
    try:
        # By the clock that the kernel itself notes a start with. Times of day come from the boot's,
        # which is known to the second only.
        with open("/proc/self/stat") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # another system
        import psutil

        return time.time() - float(psutil.Process().create_time())
