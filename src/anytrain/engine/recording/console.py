"""Show a run to a person: a bar in a terminal or a notebook, plain lines anywhere else.

Nothing here reads the device. Loss and learning rate are those of the last log entry; speed
comes from the host's clock. Between two drawings, a step costs one look at that clock.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, TextIO

from anytrain.core.environment import in_notebook, variable
from anytrain.core.notices import give_notice
from anytrain.core.text import printable
from anytrain.engine.recording.formatting import (
    LogEntry,
    Pairs,
    Summary,
    duration,
    mean,
    number,
    rate,
    size,
)
from anytrain.machine.processes import notebook_cell

DeviceMemory = Callable[[], Mapping[str, int]]
"""Returns the bytes in use, by device."""
Shares = Callable[[], Mapping[str, float]]
"""Returns the share of the time that went to each name of the time ledger."""
_MOST_LOSSES = 256
_SHOWN_SHARE = 0.005
_WINDOW_S = 20.0
# Two steps beyond the first: the second of a run may bring a new shape, and compile again.
_STEPS_BEFORE_ETA = 2


@dataclass(frozen=True, slots=True)
class Course:
    """What is known of a training when it begins."""

    total: int | None
    step: int = 0
    samples_per_step: int | None = None
    evaluates: bool = False
    memory: DeviceMemory | None = None
    shares: Shares | None = None
    spent_in: str = "time"
    """What the shares are of."""
    is_here: bool = True
    """Whether this process trains, so that its own memory is the run's."""


@dataclass(slots=True)
class EvaluationProgress:
    """How far an evaluation is."""

    total: int | None
    began: float
    done: int = 0


class BoundedCurve:
    """A curve of bounded length: each of its points is the mean of equally many entries."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._each = 1
        self._held: list[float] = []
        self._step = 0

    def add(self, step: int, value: Any) -> None:
        if not isinstance(value, int | float) or not math.isfinite(value):
            return
        self._held.append(float(value))
        self._step = step
        if len(self._held) == self._each:
            self._points, self._held = self.points(), []
        if len(self._points) == 2 * _MOST_LOSSES:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(late, mean([a, b])) for (_, a), (late, b) in pairs]
            self._each *= 2

    def points(self) -> list[tuple[int, float]]:
        """Return step and value of each point; the newest may hold fewer entries."""
        newest = [(self._step, mean(self._held))] if self._held else []
        return self._points + newest


@dataclass(slots=True)
class LiveFigures:
    """What is shown of a run between two entries of its log."""

    latest: dict[str, str] = field(default_factory=dict)
    memory: Pairs = field(default_factory=list)
    loss: str = "loss"
    """What the training loss is called."""
    losses: BoundedCurve = field(default_factory=BoundedCurve)
    """The training losses so far."""
    remark: str = ""
    """What else is to be said, such as that nothing was heard for long."""
    is_over: bool = False
    """Whether it is known that no step follows."""


class Pace:
    """How fast a run goes and when it will end, with pauses for what is not training.

    The first step is left out: on many devices it compiles, and tells nothing of the others.
    """

    def __init__(self, now: float, step: int) -> None:
        self.began = now
        self._first: tuple[float, int] | None = None
        self._last = (now, step)
        # Times less the pauses so far, so that an evaluation does not look like slow training.
        self._recent: deque[tuple[float, int]] = deque()
        self._paused_s = 0.0
        self._paused_at: float | None = None

    def mark(self, now: float, step: int) -> None:
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


class Display:
    """A run as it is followed: position, speed, last figures. Showing it is a subclass's part."""

    interval_s = 0.2
    """The least time between two drawings: one takes half a millisecond."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.course = Course(total=None)
        self.step = 0
        self.standing = LiveFigures()
        self.pace: Pace | None = None
        self.evaluation: EvaluationProgress | None = None
        self._due = 0.0

    def begin(self, course: Course) -> None:
        """Start showing a training."""
        self.course, self.step, self.standing = course, course.step, LiveFigures()
        self.pace = Pace(self.clock(), course.step)
        self._due = 0.0
        self.measure_memory()
        self.draw()

    def advance(self, step: int) -> None:
        """Note that `step` steps are done; draw if the last drawing is old enough."""
        self.step = step
        now = self.clock()
        if now < self._due or self.pace is None:
            return
        self.pace.mark(now, step)
        self.draw()
        self._due = now + self.interval_s

    def note(self, entry: LogEntry) -> None:
        """Take the figures of an entry of the log, and show it."""
        self.take(entry)
        self.measure_memory()
        self.tell(entry)

    def take(self, entry: LogEntry, *, at_update: bool = True) -> None:
        """Take the figures of an entry; its step tells the pace where it counts updates."""
        if entry.is_evaluation:
            return
        if at_update and self.pace is not None and entry.step > self.course.step:
            self.pace.mark(self.clock(), entry.step)
        self.standing.latest.update(entry.pairs())
        if entry.loss is not None:
            self.standing.loss = entry.loss
            self.standing.losses.add(entry.step, entry.values[entry.loss])

    def evaluating(self, done: int, total: int | None) -> None:
        """Note how many batches of an evaluation are done."""
        now = self.clock()
        if self.evaluation is None:
            self.evaluation = EvaluationProgress(total, began=now)
            self._due = 0.0
            if self.pace is not None:
                self.pace.pause(now)
        self.evaluation.done = done
        if now >= self._due:
            self.draw()
            self._due = now + self.interval_s

    def evaluated(self) -> None:
        """Go on with the training, if there is one."""
        if self.evaluation is not None:
            self.evaluation = None
            if self.pace is not None:
                self.pace.go_on(self.clock())
            self.draw()

    def end(self, summary: Summary) -> None:
        """Stop showing, and say what came of it."""
        self.pace = self.evaluation = None

    def close(self) -> None:
        """Stop showing, and leave the screen in order, whatever happened."""
        self.pace = self.evaluation = None

    def draw(self) -> None:
        """Show how the run stands."""

    def tell(self, entry: LogEntry) -> None:
        """Show an entry."""

    def elapsed(self) -> str:
        return "" if self.pace is None else duration(self.clock() - self.pace.began)

    def times(self) -> str:
        """Return the time since the beginning and, where it is known, the time that is left."""
        left = self.left()
        return f"{self.elapsed()}, {left} left" if left else self.elapsed()

    def memory(self) -> list[str]:
        """Return the memory in use, as it was at the last entry."""
        return [f"{name} {amount}" for name, amount in self.standing.memory]

    def left(self) -> str:
        """Return the time that is left; nothing where it is not known yet."""
        if self.pace is None or self.course.total is None or self.step >= self.course.total:
            return ""
        if self.standing.is_over:
            return ""
        seconds = self.pace.seconds_left(self.course.total)
        return "" if seconds is None else duration(seconds)

    def speed(self) -> str:
        """Return samples, else steps, per second; nothing where it is not known yet."""
        per_second = None if self.pace is None else self.pace.steps_per_second()
        if per_second is None:
            return ""
        if self.course.samples_per_step is None:
            return f"{rate(per_second)} steps/s"
        return f"{rate(per_second * self.course.samples_per_step)} samples/s"

    def spent(self) -> list[str]:
        """Return where the time went so far, the most first; nothing where nobody knows."""
        if self.course.shares is None:
            return []
        found = sorted(self.course.shares().items(), key=lambda pair: -pair[1])
        return [f"{name} {share:.0%}" for name, share in found if share >= _SHOWN_SHARE]

    def measure_memory(self) -> None:
        """Take down memory use: once an entry, for asking costs tens of microseconds."""
        amounts: dict[str, int] = {}
        if self.course.is_here:
            import psutil

            amounts["host"] = psutil.Process().memory_info().rss
        if self.course.memory is not None:
            amounts.update(self.course.memory())
        self.standing.memory = [(name, size(amount)) for name, amount in amounts.items()]


class PlainDisplay(Display):
    """One line per entry of the log, and no control characters."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._stream = stream
        self.is_broken = False
        """Whether what it writes to has gone away."""

    def tell(self, entry: LogEntry) -> None:
        """Write the entry as a line; outside a training the caller has the figures."""
        if self.pace is None:
            return
        of = "" if self.course.total is None else f"/{self.course.total}"
        parts = [f"step {entry.step}{of}"]
        if entry.epoch is not None:
            parts.append(f"epoch {number(entry.epoch)}")
        parts.extend(f"{name} {value}" for name, value in entry.pairs())
        if not entry.is_evaluation:
            left = self.left()
            figures = (self.speed(), f"ETA {left}" if left else "", *self.memory())
            parts.extend(part for part in figures if part)
        self.say("  ".join(parts))

    def end(self, summary: Summary) -> None:
        super().end(summary)
        rows = summary.rows()
        widest = max(len(name) for name, _ in rows)
        self.say(summary.title)
        for name, value in rows:
            self.say(f"  {name:<{widest}}  {value}")

    def say(self, text: str) -> None:
        """Write a line."""
        stream = sys.stdout if self._stream is None else self._stream
        if self.is_broken:
            return
        try:
            put(stream, printable(text) + "\n")
        except (OSError, ValueError) as error:  # nobody reads any more, or the file was closed
            self.is_broken = True
            tell_broken(error)


class GuardedConsole:
    """A console whose failures end the showing, and never the run."""

    def __init__(self, console: Display) -> None:
        self._console: Display | None = console

    def begin(self, course: Course) -> None:
        self._try("begin", course)

    def advance(self, step: int) -> None:
        self._try("advance", step)

    def note(self, entry: LogEntry) -> None:
        self._try("note", entry)

    def evaluating(self, done: int, total: int | None) -> None:
        self._try("evaluating", done, total)

    def evaluated(self) -> None:
        self._try("evaluated")

    def end(self, summary: Summary) -> None:
        self._try("end", summary)

    def close(self) -> None:
        self._try("close")

    def _try(self, call: str, *args: Any) -> None:
        if self._console is None:
            return
        try:
            getattr(self._console, call)(*args)
        except Exception as error:  # noqa: BLE001 - whatever a display raises, the run goes on
            broken, self._console = self._console, None
            with suppress(Exception):  # it gives standard output back
                broken.close()
            tell_broken(error)


def put(stream: IO[str], text: str) -> None:
    """Write text; what the stream's encoding lacks becomes a question mark."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def tell_broken(error: Exception) -> None:
    """Say that nothing more is shown."""
    why = str(error).rstrip(".") or type(error).__name__
    give_notice(f"Progress is no longer shown: {why}. Training goes on.", stacklevel=3)


def pick() -> Display:
    """Return the console that suits where this process writes to."""
    pipe = notebook_cell.cell_pipe()
    if pipe is not None:  # a notebook launched this process: its cell shows the page
        from anytrain.engine.recording.notebook import NotebookBar

        return NotebookBar(partial(notebook_cell.CellOutput, pipe))
    if in_notebook():
        from anytrain.engine.recording.notebook import NotebookBar

        return NotebookBar()
    if is_terminal(sys.stdout) and is_terminal(sys.stderr):
        from anytrain.engine.recording.terminal import Terminal

        return Terminal()
    return PlainDisplay()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether the stream goes to a terminal that can move its cursor."""
    try:
        is_tty = stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
    return is_tty and variable("TERM") not in ("dumb", "unknown")
