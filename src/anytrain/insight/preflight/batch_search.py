"""Find the largest micro-batch that fits a target, and the accumulation that keeps the batch.

A step takes the same memory in the same order whatever its batch size; only sizes differ, and each
is a straight line in the batch size. So two traces tell the sizes of every other one, and the
allocator is played on those. A third trace, at the size that was found, is the proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from anytrain.insight.preflight.memory import Forecast, Limit, fits_within, forecast, limit_of
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Held, Setting, Trace

MOST = 2**16
"""Where the search ends: a larger batch is not trained with."""
_MOST_PROOFS = 4


TraceAt = Callable[[Setting], Trace]


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest micro-batch of one setting, and how it makes the effective batch up."""

    setting: Setting
    largest: int
    """0 where not even one sample fits."""
    micro_batch: int
    """The largest one that divides the effective batch."""
    accumulation: int
    forecast: Forecast
    """At the largest size; at one sample where none fits."""
    is_proven: bool
    """Whether a trace at that very size bears it out."""
    most: int = MOST
    """Where the search ends: the data have no more for a batch."""


def between(first: Trace, second: Trace, batch_size: int) -> Trace | None:
    """Interpolate the trace at another batch size from two; None where their events differ.

    >>> from anytrain.insight.preflight.trace import TracedJob
    >>> def trace(n):
    ...     held = Held(8 + n, {"batch": n}, {}, (), ((0, 8), (1, n)), (1, 2))
    ...     return Trace(TracedJob(batch_size=n), (), held, 0.0)
    >>> between(trace(2), trace(4), 7).held.events
    ((0, 8), (1, 7))
    """
    low, high = first.job.batch_size, second.job.batch_size
    one, two = first.held, second.held
    if low == high or one.step != two.step or not _are_alike(one, two):
        return None

    def line(at_low: int, at_high: int) -> int:
        # Rounded up: a size that is no straight line must not be taken for less than it is.
        return max(at_low + -((at_low - at_high) * (batch_size - low) // (high - low)), 0)

    def lines(at_low: dict[str, int], at_high: dict[str, int]) -> dict[str, int]:
        names = {**at_low, **at_high}
        return {name: line(at_low.get(name, 0), at_high.get(name, 0)) for name in names}

    held = Held(
        peak_bytes=line(one.peak_bytes, two.peak_bytes),
        by_owner=lines(one.by_owner, two.by_owner),  # type: ignore[arg-type]
        activations_by_module=lines(one.activations_by_module, two.activations_by_module),
        timeline=(),
        events=tuple(
            (which, max(line(at_low, at_high), 1) if at_low else 0)
            for (which, at_low), (_, at_high) in zip(one.events, two.events, strict=True)
        ),
        step=one.step,
    )
    return replace(first, job=replace(first.job, batch_size=batch_size), held=held)


def _are_alike(one: Held, two: Held) -> bool:
    """Whether both take and give back the same memory in the same order."""
    return len(one.events) == len(two.events) and all(
        which == other and (size > 0) == (size_there > 0)
        for (which, size), (other, size_there) in zip(one.events, two.events, strict=True)
    )


class _Search:
    """The search for one setting's largest batch."""

    def __init__(
        self, trace_at: TraceAt, target: Target, limit: Limit, wanted: Setting, most: int
    ) -> None:
        self._trace_at, self._target, self._limit = trace_at, target, limit
        self._wanted, self._most = wanted, most
        self._traces: dict[int, Trace] = {}

    def trace(self, batch_size: int) -> Trace:
        """Return the trace at a size; each is made once."""
        if batch_size not in self._traces:
            self._traces[batch_size] = self._trace_at(replace(self._wanted, batch_size=batch_size))
        return self._traces[batch_size]

    def foretell(self, batch_size: int) -> Forecast:
        return forecast(self.trace(batch_size), self._target, self._limit)

    def _fits(self, trace: Trace) -> bool:
        return fits_within(trace, self._target, self._limit)

    def largest(self) -> tuple[int, bool]:
        """Return the largest size that fits, and whether a trace has borne it out."""
        low = max(self._wanted.batch_size, 2)  # one sample may be computed in another way
        pair, found = (low, 2 * low), 0
        for _ in range(_MOST_PROOFS):
            found = self._below(*pair)
            if found in self._traces or found == 0:
                return self._settled(found)
            if self._fits(self.trace(found)) and self._is_line(*pair, found):
                return found, True
            pair = (pair[0], found) if found > pair[0] else (found, pair[0])
        return self._settled(found)

    def _settled(self, found: int) -> tuple[int, bool]:
        """Close in on it by a few traces more: the last word is a trace's."""
        good = max((n for n, t in self._traces.items() if n < found and self._fits(t)), default=0)
        bad, size = found + 1, found
        for _ in range(_MOST_PROOFS):
            if size <= good:
                break
            good, bad = (size, bad) if self._fits(self.trace(size)) else (good, size)
            size = self._nearer(good, bad)
        return good, good > 0

    def _nearer(self, good: int, bad: int) -> int:
        """Return a size between two, where a straight line through their needs meets the limit."""
        if good == 0 or bad - good <= 1 or bad not in self._traces:
            return (good + bad) // 2
        low, high = (self.foretell(n).needed_bytes for n in (good, bad))
        if low >= high:
            return (good + bad) // 2
        room = (self._limit.usable_bytes - low) * (bad - good) // (high - low)
        return min(max(good + room, good + 1), bad - 1)

    def _is_line(self, low: int, high: int, found: int) -> bool:
        """Whether the trace at the found size lies on the line through the two others."""
        told = between(self.trace(low), self.trace(high), found)
        return told is not None and told.held.events == self.trace(found).held.events

    def _below(self, low: int, high: int) -> int:
        """Return the largest size that fits by the lines through two traces."""
        first, second = self.trace(low), self.trace(high)

        def fits(size: int) -> bool:
            told = self._traces.get(size) or between(first, second, size)
            return self._fits(told or self._by_peak(first, second, size))

        good, bad = 0, 1
        while bad <= self._most and fits(bad):
            good, bad = bad, 2 * bad
        bad = min(bad, self._most + 1)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        return good

    @staticmethod
    def _by_peak(first: Trace, second: Trace, size: int) -> Trace:
        """Return a trace with an interpolated peak alone, where the events of two steps differ."""
        plain = [
            replace(trace, held=replace(trace.held, events=(), step=(0, 0)))
            for trace in (first, second)
        ]
        told = between(plain[0], plain[1], size)
        assert told is not None
        return told


def largest_batch(
    trace_at: TraceAt,
    target: Target,
    wanted: Setting,
    *,
    accumulation: int = 1,
    limit: Limit | None = None,
    most: int = MOST,
) -> Fit | None:
    """Return the largest micro-batch that fits the target; None where its memory is not known.

    `trace_at` traces the run in another setting. `wanted` is the one that was asked for, whose
    batch size times the accumulation is the effective batch. None larger than `most` is found.
    """
    limit = limit or limit_of(target)
    if limit is None:
        return None
    search = _Search(trace_at, target, limit, wanted, most)
    largest, is_proven = search.largest()
    micro = dividing(wanted.batch_size * accumulation, largest)
    return Fit(
        setting=wanted,
        largest=largest,
        micro_batch=micro,
        accumulation=wanted.batch_size * accumulation // micro if micro else 0,
        forecast=search.foretell(max(largest, 1)),
        is_proven=is_proven,
        most=most,
    )


def dividing(effective: int, largest: int) -> int:
    """Return the largest micro-batch that fits and divides the effective batch.

    >>> dividing(32, 20), dividing(32, 64), dividing(7, 5)
    (16, 32, 1)
    """
    return max((n for n in range(1, min(effective, largest) + 1) if effective % n == 0), default=0)
