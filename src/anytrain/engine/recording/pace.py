"""How fast a run goes and when it will end, by the host's clock.

The first step is left out: on many devices it compiles, and tells nothing of the others.
"""

from __future__ import annotations

from collections import deque

_WINDOW_S = 20.0
# Two steps beyond the first: the second of a run may bring a new shape, and compile again.
_STEPS_BEFORE_ETA = 2


class Pace:
    """Measure steps against the clock, with pauses for what is not training."""

    def __init__(self, now: float, step: int) -> None:
        self.began = now
        self._first: tuple[float, int] | None = None
        self._last = (now, step)
        # Times less the pauses so far, so that an evaluation does not look like slow training.
        self._recent: deque[tuple[float, int]] = deque()
        self._paused_s = 0.0
        self._paused_at: float | None = None

    def mark(self, now: float, step: int) -> None:
        """Note that `step` steps are done."""
        if self._first is None:
            self._first = (now, step)
        self._last = (now, step)
        active = now - self._paused_s
        self._recent.append((active, step))
        while len(self._recent) > 2 and self._recent[1][0] < active - _WINDOW_S:
            self._recent.popleft()

    def pause(self, now: float) -> None:
        """Stop counting time as training, once."""
        if self._paused_at is None:
            self._paused_at = now

    def go_on(self, now: float) -> None:
        """Count time as training again."""
        if self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None

    def steps_per_second(self) -> float | None:
        """Return the speed of the last seconds of training; None before it is known."""
        if len(self._recent) < 2:
            return None
        (begun, first), (ended, last) = self._recent[0], self._recent[-1]
        return (last - first) / (ended - begun) if last > first and ended > begun else None

    def seconds_left(self, total: int) -> float | None:
        """Return the time to the last step, evaluations counted as often as they came so far."""
        if self._first is None:
            return None
        (begun, first), (now, step) = self._first, self._last
        if step - first < _STEPS_BEFORE_ETA:
            return None
        return (now - begun) / (step - first) * max(total - step, 0)
