"""Read the losses that a run has logged, and find where two runs' curves part.

Understood are a run's own log and the plain files of `log_with="jsonl"` and `log_with="csv"`.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytrain.core import records

Curves = dict[str, dict[int, list[float]]]
"""By "counter/name", by step, every value that was logged: a redone step may have several."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first step at which a logged loss is not the same."""

    name: str
    step: int
    one: float
    other: float

    def __str__(self) -> str:
        return f"{self.name} parts at step {self.step}: {self.one!r} and {self.other!r}"


def read_losses(folder: Path) -> Curves:
    """Return what was logged below a folder under names with "loss" in them."""
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for row in _rows(folder):
        # Trackers and the run itself may count other steps.
        counted = "_step" if "_step" in row else "step"
        step = _number(row.get(counted))
        for name, value in row.items():
            loss = _number(value) if "loss" in name.lower() else None
            if step is not None and loss is not None:
                curves[f"{counted}/{name}"][int(step)].append(loss)
    return curves


def first_parting(one: Curves, other: Curves) -> Parting | None:
    """Return where the curves of two runs part first; None where they never do."""
    found = [
        Parting(name.partition("/")[2], step, values[0], value)
        for name, steps in one.items()
        for step, values in steps.items()
        for value in other.get(name, {}).get(step, ())
        if repr(value) != repr(values[0])
    ]
    return min(found, key=lambda parting: parting.step, default=None)


def _rows(folder: Path) -> Iterator[Mapping[str, Any]]:
    for path in sorted(folder.rglob(records.METRICS)):
        yield from records.open_run(path.parent).metrics
    for path in sorted(folder.rglob("metrics.csv")):
        with path.open(newline="", errors="replace") as file:
            yield from csv.DictReader(file)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
