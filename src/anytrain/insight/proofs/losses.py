"""Read the losses that a run has logged, and find where two runs' curves part.

Understood are the plain files that `log_with="jsonl"` and `log_with="csv"` write.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Curves = dict[str, dict[int, list[float]]]
"""By name, by step, every value that was logged: a step that was redone has several."""


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
        step = _number(row.get("_step", row.get("step")))
        for name, value in row.items():
            loss = _number(value) if "loss" in name.lower() else None
            if step is not None and loss is not None:
                curves[name][int(step)].append(loss)
    return curves


def first_parting(one: Curves, other: Curves) -> Parting | None:
    """Return where the curves of two runs part first; None where they never do."""
    found = [
        Parting(name, step, values[0], value)
        for name, steps in one.items()
        for step, values in steps.items()
        for value in other.get(name, {}).get(step, ())
        if repr(value) != repr(values[0])
    ]
    return min(found, key=lambda parting: parting.step, default=None)


def _rows(folder: Path) -> Iterator[Mapping[str, Any]]:
    for path in sorted(folder.rglob("metrics.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # a kill may tear a line
                continue
            if isinstance(row, dict):
                yield row
    for path in sorted(folder.rglob("metrics.csv")):
        with path.open(newline="", errors="replace") as file:
            yield from csv.DictReader(file)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
