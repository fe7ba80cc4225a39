"""What a person is shown of a run, and how numbers, times and sizes are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anytrain.core.text import in_no_checkpoint

Pairs = list[tuple[str, str]]
_SHORT = {"learning_rate": "lr"}
_TIMES = ("_runtime", "_samples_per_second", "_steps_per_second")
_NOT_TRAINING = ("eval", "val", "test", "valid", "dev")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of a run's log."""

    step: int
    epoch: float | None
    values: Mapping[str, Any]
    is_evaluation: bool = False

    def pairs(self) -> Pairs:
        """Return names and values as text, the place in the run not among them."""
        return [(name, number(value)) for name, value in self.values.items()]

    @property
    def loss(self) -> str | None:
        """The name of the training loss among the values; None where there is none."""
        if self.is_evaluation:
            return None
        named = [name for name in self.values if name.lower().endswith("loss")]
        return next((n for n in named if not n.lower().startswith(_NOT_TRAINING)), None)


def entry(step: int, epoch: float | None, logs: Mapping[str, Any]) -> LogEntry:
    """Return what is shown of a log entry: losses first, and not how long things took.

    >>> entry(5, 0.5, {"learning_rate": 2e-05, "loss": 0.7, "epoch": 0.5}).pairs()
    [('loss', '0.7'), ('lr', '2e-05')]
    """
    values = {
        _SHORT.get(name, name): logs[name]
        for name in sorted(logs, key=rank)
        if name not in ("epoch", "total_flos") and not is_time(name)
    }
    is_evaluation = any(name.endswith("_runtime") for name in logs)
    return LogEntry(step, logs.get("epoch", epoch), values, is_evaluation)


def rank(name: str) -> int:
    """Put losses first, then the learning rate; the rest stays in its order."""
    return 0 if name == "loss" or name.endswith("_loss") else 1 if name == "learning_rate" else 2


def is_time(name: str) -> bool:
    """Whether a logged figure says how long something took."""
    return name.endswith(_TIMES)


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of a training."""

    steps: int
    max_steps: int | None
    epochs: float | None
    seconds: float
    samples_per_second: float | None = None
    loss: float | None = None
    """The training loss logged last."""
    lowest_loss: tuple[float, int] | None = None
    """The lowest training loss logged, and its step."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The figures of the last evaluation."""
    best: tuple[str, float, int | None] | None = None
    """Name, value and step of the figure the best model is chosen by."""
    best_checkpoint: str | None = None
    results: str | None = None
    """Where the results lie."""
    remark: str | None = None
    unsaved: tuple[str, str] | None = None
    """Since when nothing that was learnt is in a checkpoint, and why the last save failed."""
    compiled: str | None = None
    """Where the time went, if something but the steps took much of it."""
    since: int = 0
    """The step that this start went on from: the time and the speed are of what came after it."""
    heading: str | None = None
    """What to say first, where it is known better than by the count of steps."""

    @property
    def title(self) -> str:
        """Whether training came to its end."""
        if self.heading is not None:
            return self.heading
        done = self.max_steps is None or self.steps >= self.max_steps
        return "Training done" if done else "Training stopped early"

    def rows(self) -> Pairs:
        """Return what is known, named."""
        of = f" since step {self.since}" if self.since else ""
        has_trained = not self.since or self.steps > self.since
        rows = [("steps", self._steps())]
        if has_trained:
            rows.append((f"time{of}", duration(self.seconds)))
        if self.epochs is not None:
            rows.insert(1, ("epochs", number(self.epochs)))
        if self.samples_per_second is not None and has_trained:
            rows.append((f"samples/s{of}", rate(self.samples_per_second)))
        if self.loss is not None:
            rows.append(("last loss", number(self.loss) + self._lowest()))
        rows.extend((name, number(value)) for name, value in self.metrics.items())
        if self.best is not None:
            name, value, step = self.best
            rows.append((f"best {name}", f"{number(value)}{_at(step)}"))
        told = {
            "not saved": self._not_saved(),
            "best checkpoint": self.best_checkpoint,
            "results": self.results,
            "compiled": self.compiled,
            "time went to": self.remark,
        }
        return rows + [(name, value) for name, value in told.items() if value]

    def _steps(self) -> str:
        cut_short = self.max_steps is not None and self.steps < self.max_steps
        return f"{self.steps} of {self.max_steps}" if cut_short else str(self.steps)

    def _not_saved(self) -> str | None:
        if self.unsaved is None:
            return None
        since, why = self.unsaved
        return f"the last save failed ({why.rstrip('.')}); {in_no_checkpoint(since)}"

    def _lowest(self) -> str:
        if self.lowest_loss is None or self.lowest_loss[0] == self.loss:
            return ""
        value, step = self.lowest_loss
        return f" (lowest {number(value)}{_at(step)})"


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def number(value: Any) -> str:
    """Return a value as people read it: four figures of a float, the rest as its text.

    >>> [number(value) for value in (0.693147, 2e-05, 3.0, 120, float("nan"), "warm")]
    ['0.6931', '2e-05', '3', '120', 'nan', 'warm']
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def mean(values: Sequence[float]) -> float:
    """Return the mean of values, which may be as large as floats get.

    >>> mean([1e308, 1.5e308, 1.25e308])
    1.25e+308
    """
    return sum(value / len(values) for value in values)


def rate(per_second: float) -> str:
    """Return a speed without figures that nobody reads.

    >>> [rate(speed) for speed in (0.031, 7.25, 312.4, 12800.0)]
    ['0.031', '7.2', '312', '12,800']
    """
    if per_second < 1:
        return f"{per_second:.2g}"
    return f"{per_second:,.1f}" if per_second < 100 else f"{per_second:,.0f}"


def duration(seconds: float) -> str:
    """Return a time as h:mm:ss, without hours where there are none.

    >>> [duration(s) for s in (0.4, 25, 3723, 200000)]
    ['0:00', '0:25', '1:02:03', '2 d 7:33:20']
    """
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minutes}:{second:02}"


def size(num_bytes: float) -> str:
    """Return an amount of memory.

    >>> [size(n) for n in (512, 300 * 2**20, 3.25 * 2**30, 139 * 2**30)]
    ['0 MiB', '300 MiB', '3.2 GiB', '139 GiB']
    """
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    gibibytes = num_bytes / 2**30
    return f"{gibibytes:.1f} GiB" if gibibytes < 100 else f"{gibibytes:.0f} GiB"


def lines(pairs: Iterable[tuple[str, str]], width: int) -> list[str]:
    """Join names and values into lines no wider than `width`, breaking between pairs only.

    >>> lines([("step", "10"), ("loss", "0.6931"), ("lr", "2e-05")], width=22)
    ['step 10  loss 0.6931', '  lr 2e-05']
    """
    done: list[str] = []
    current = ""
    for name, value in pairs:
        pair = f"{name} {value}"
        if current and len(current) + 2 + len(pair) > width:
            done.append(current)
            current = f"  {pair}"
        else:
            current = f"{current}  {pair}" if current else pair
    return [*done, current] if current else done


def fitting(parts: Iterable[str], width: int) -> str:
    """Join the leading parts that fit into one line, two spaces apart.

    >>> fitting(["loss 0.69", "lr 2e-05", "host 3.2 GiB"], width=20)
    'loss 0.69  lr 2e-05'
    """
    line = ""
    for part in parts:
        longer = f"{line}  {part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line
