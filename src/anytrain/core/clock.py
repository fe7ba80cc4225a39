"""The time ledger: where a run's wall time goes.

At each moment exactly one entry is running, so the entries add up to the wall time. A span inside
another one takes its time off the outer one. Time outside any span is the rest: "other", until the
ledger is told a better name. A ledger is written by one thread; what other threads do costs the
run nothing until somebody waits for it.
"""

from __future__ import annotations

from time import perf_counter
from types import TracebackType

NAMES = ("start", "data", "transfer", "step", "wait", "evaluate", "save", "record", "other")
"""What the entries mean, in the order they are shown.

start: from the start of the process to the first step. data: waiting for the next batch.
transfer: host to device. step: computing. wait: the host waits for the device, which belongs to
the step. record: compiling, or recording a graph. other: the rest.
"""


class Span:
    """One entry of a ledger; use it with `with`, as often as you like."""

    __slots__ = ("_before", "_ledger", "name", "seconds", "uses")

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._before = 0.0
        self.name = name
        self.seconds = 0.0
        """Time of the uses that are over, and of the running one up to its last interruption."""
        self.uses = 0

    @property
    def last(self) -> float:
        """Seconds of the last use, without the spans inside it."""
        return self.seconds - self._before

    def __enter__(self) -> None:
        ledger = self._ledger
        running, now = ledger.running, perf_counter()
        running.seconds += now - ledger.since
        ledger.outer.append(running)
        ledger.running, ledger.since = self, now
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
        self.seconds += now - ledger.since
        ledger.running, ledger.since = ledger.outer.pop(), now


class Ledger:
    """Seconds of wall time by name; begins when it is made."""

    __slots__ = ("_spans", "hidden", "outer", "running", "since")

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}
        self.outer: list[Span] = []
        """What runs on when the running span is over, the innermost last."""
        self.running = self.span("other")
        self.since = perf_counter()
        self.hidden = 0.0
        """Seconds of waiting that cost nothing, because the device was still busy."""

    def __reduce__(self) -> tuple[type[Ledger], tuple[()]]:
        return Ledger, ()  # time is measured in one process; a copy begins its own

    def span(self, name: str) -> Span:
        """Return the span of this name; the same object each time."""
        found = self._spans.get(name)
        if found is None:
            found = self._spans[name] = Span(self, name)
        return found

    def add(self, name: str, seconds: float) -> None:
        """Say that so many of the running span's seconds were really this.

        Of a time that passed before the ledger began, use `lead`.
        """
        self.span(name).seconds += seconds
        self.running.seconds -= seconds

    def lead(self, name: str, seconds: float) -> None:
        """Count time from before the ledger began."""
        self.span(name).seconds += seconds

    def rest(self, name: str) -> None:
        """Call the time outside any span so from now on."""
        now, span = perf_counter(), self.span(name)
        if self.outer:
            self.outer[0] = span
            return
        self.running.seconds += now - self.since
        self.running, self.since = span, now

    def hide(self, name: str, behind: str = "step") -> None:
        """Give the last use's time to what the device was doing meanwhile: it cost nothing."""
        span = self.span(name)
        seconds, span._before = span.last, span.seconds
        span.seconds -= seconds
        span._before -= seconds
        self.span(behind).seconds += seconds
        self.hidden += seconds

    def totals(self) -> dict[str, float]:
        """Return the seconds of each name up to now; together they are the wall time."""
        now = perf_counter()
        self.running.seconds += now - self.since
        self.since = now
        seconds = {name: span.seconds for name, span in self._spans.items()}
        order = [name for name in NAMES if name in seconds]
        return {name: seconds[name] for name in [*order, *(n for n in seconds if n not in NAMES)]}

    def shares(self) -> dict[str, float]:
        """Return each name's share of the wall time; together they are 1."""
        totals = self.totals()
        whole = sum(totals.values())
        return {name: seconds / whole if whole else 0.0 for name, seconds in totals.items()}
