"""The curves of a run: which figure goes into which chart.

What was logged while training and evaluating under one name is one chart: `loss` and `eval_loss`.
Learning rate, gradient norm, throughput and memory have charts of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from anytrain.core.documents import finite, real
from anytrain.core.records import Life, RunRecord
from anytrain.insight.pages.charts import Chart, Point, Series
from anytrain.insight.pages.markup import text

_PLACES = frozenset(("step", "epoch", "time", "event"))
_PHASES = ("train", "eval", "val", "valid", "validation", "test")
_CLOCKED = re.compile(
    rf"(?:{'|'.join(_PHASES)})[_/](?:.+[_/])?"
    "(?:runtime|(?:samples|steps|tokens)_per_second|(?:model_)?preparation_time)|total_flos"
)
_TITLES = {"loss": "Loss", "learning_rate": "Learning rate", "grad_norm": "Gradient norm"}
_ORDER = ("loss", "learning_rate", "grad_norm")
# A life's first seconds say little: its first batches are slower than the others.
_LEAST_S = 0.5


def charts_of(run: RunRecord, known: Figures | None = None) -> list[Chart]:
    """Return all charts of a run: figures of the model first, then speed and memory."""
    marks = starts(run)
    grouped: dict[str, list[_Line]] = {}
    curves = (known or figures(run)).curves
    for name, points in curves.items():
        if not is_clocked(name):
            base, phase = _phase(name, curves)
            grouped.setdefault(base, []).append(_Line(name, phase, points))
    order = [name for name in _ORDER if name in grouped]
    order += [name for name in grouped if name not in order]
    found = [
        Chart(
            name=f"figure {name}",
            title=_TITLES.get(name, name),
            series=_series(name, grouped[name]),
            marks=marks,
            broad=name == "loss",
        )
        for name in order
        if any(len(line.points) > 1 for line in grouped[name])  # one point is no curve
    ]
    return [*found, *machine_charts(run)]


def machine_charts(run: RunRecord) -> list[Chart]:
    """Return throughput and memory over the steps, as far as the record knows them."""
    lives, marks = counted(run), starts(run)
    rates = [point for life, end in lives for point in _rates(life) if point[0] <= end]
    found = []
    if rates:
        name = "samples/s" if _samples(lives[-1][0]) else "steps/s"
        found.append(
            Chart("machine rate", f"Throughput ({name})", [Series(name, rates)], marks=marks)
        )
    memory = [
        Series(title, points)
        for key, title in (("peak_bytes", "highest so far"), ("used_bytes", "now"))
        if (points := _standing(lives, key))
    ]
    if memory:
        found.append(Chart("machine memory", "Memory", memory, unit="bytes", marks=marks))
    return found


@dataclass(frozen=True, slots=True)
class Figures:
    """What was logged: points by step, by name."""

    curves: dict[str, list[Point]]
    ends: dict[str, list[Point]]
    """What a training says once, at its end."""
    apart: dict[str, list[Point]]
    """What was evaluated after a training and is no point of a curve, by name and weights."""


def figures(run: RunRecord) -> Figures:
    """Return all that was logged; of several values at one step the last counts."""
    curves: dict[str, dict[float, float | None]] = {}
    ends: dict[str, dict[float, float | None]] = {}
    for entry in run.metrics:
        step = finite(entry.get("step"))
        if step is None:
            continue
        found = ends if "train_runtime" in entry else curves
        for name, value in entry.items():
            # The usual kind first: a long run has a million of them.
            number = value if type(value) is float else real(value)
            if number is None or name in _PLACES:
                continue
            if name in found:
                found[name][step] = number
            else:
                found[name] = {step: number}
    return Figures(_ordered(curves), _ordered(ends), _apart(run))


def _apart(run: RunRecord) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for entry in run.apart:
        step, of = finite(entry.get("step")), entry.get("of")
        whose = "after the training" if of is None else f"of {text(of, 100)}"
        for name, value in entry.items():
            number = real(value)
            if number is not None and name not in _PLACES and step is not None:
                found.setdefault(f"{name} {whose}", []).append((step, number))
    return found


def history(run: RunRecord, name: str) -> list[Point]:
    """Return one logged figure as points by step."""
    return figures(run).curves.get(name, [])


def counted(run: RunRecord) -> list[tuple[Life, float]]:
    """Return the lives that the run's history is made of, each with the last step that counts."""
    lives = run.counted_lives
    ends = [_begin(later) for later in lives[1:]] + [float("inf")]
    return list(zip(lives, ends, strict=False))  # no life yet: none at all


def starts(run: RunRecord) -> list[tuple[float, str]]:
    """Return where the run was started again, as marks on the x axis."""
    later = [_begin(life) for life, _ in counted(run)[1:]]
    return [(step, f"start {number}") for number, step in enumerate(later, 2)]


def _ordered(found: dict[str, dict[float, float | None]]) -> dict[str, list[Point]]:
    return {name: sorted(values.items()) for name, values in found.items()}


class _Line(NamedTuple):
    """A figure as it was logged, and the phase that its name tells of."""

    name: str
    phase: str
    points: list[Point]


def _series(name: str, lines: list[_Line]) -> list[Series]:
    """Return the lines of one figure, training's first; those of one phase by their full names."""
    if len(lines) == 1 and not lines[0].phase:
        return [Series(name, lines[0].points)]
    phases = Counter(line.phase or "train" for line in lines)
    order = sorted(lines, key=lambda line: (line.phase not in ("", "train"), line.phase))
    return [
        Series(phase if phases[phase] == 1 else line.name, line.points)
        for line in order
        for phase in (line.phase or "train",)
    ]


def _begin(life: Life) -> float:
    return finite(life.began.get("step")) or 0.0


def _samples(life: Life) -> float | None:
    return finite(life.began.get("samples_per_step")) or None


def _rates(life: Life) -> Iterable[Point]:
    """Yield the throughput between the moments that a life wrote down."""
    at = (_place(entry) for entry in life.times)
    known = [each for each in at if each is not None]
    before = known[0] if known else (0.0, 0.0)
    for _, (step, now) in pairwise(known):
        steps, seconds = step - before[0], now - before[1]
        if steps > 0 and seconds >= _LEAST_S:
            yield step, steps * (_samples(life) or 1.0) / seconds
            before = (step, now)


def _place(entry: dict[str, Any]) -> tuple[float, float] | None:
    step, time = finite(entry.get("step")), finite(entry.get("time"))
    return None if step is None or time is None else (step, time)


def _standing(lives: list[tuple[Life, float]], key: str) -> list[Point]:
    found: dict[float, float | None] = {}
    for life, end in lives:
        for entry in life.times:
            step, value = finite(entry.get("step")), finite(entry.get(key))
            if step is not None and step <= end and value:
                found[step] = value
    return sorted(found.items())


def is_clocked(name: str) -> bool:
    """Whether it is a time that a training notes by itself, no figure of the model.

    >>> is_clocked("eval_dev_samples_per_second"), is_clocked("tokens_per_second")
    (True, False)
    """
    return _CLOCKED.fullmatch(name) is not None


def _phase(name: str, names: Collection[str] = ()) -> tuple[str, str]:
    """Return what a figure is called, and where it comes from; `names` are all that were logged.

    >>> _phase("eval_loss"), _phase("loss"), _phase("eval/f1"), _phase("eval_dev_loss")
    (('loss', 'eval'), ('loss', ''), ('f1', 'eval'), ('loss', 'eval_dev'))
    >>> _phase("eval_contrastive_loss", {"contrastive_loss"})
    ('contrastive_loss', 'eval')
    """
    for phase in _PHASES:
        for sign in ("_", "/"):
            if name.startswith(phase + sign) and len(name) > len(phase) + 1:
                rest = name[len(phase) + 1 :]
                if rest.endswith(f"{sign}loss") and _is_of_a_set(phase + sign, rest, names):
                    return "loss", f"{phase}{sign}{rest[: -len('loss') - 1]}"
                return rest, phase
    return name, ""


def _is_of_a_set(start: str, rest: str, names: Collection[str]) -> bool:
    """Whether `eval_dev_loss` is the loss of the set "dev", and not a loss that is called so."""
    if any(other in names for other in (rest, f"train_{rest}", f"train/{rest}")):
        return False
    # Who notes times notes those of each set.
    timed = f"{start}runtime" in names
    return not timed or f"{start}{rest[: -len('loss')]}runtime" in names
