"""Boil single runs down to one row a contender, with its ratios. Loads no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anytrain.recipes.bench.contenders import BASE, CONTENDERS, Contender

# Orders of rows differ from library to library, so losses and scores differ by a little.
LOSS_TOLERANCE = 0.10
SCORE_TOLERANCE = 0.05


@dataclass
class Row:
    """A contender's typical run, and how it stands to the others."""

    contender: Contender
    runs: Sequence[Mapping[str, Any]]
    precision: str
    seconds: float
    base_ratio: float | None = None
    """How often it would be done while HF Trainer as it comes trains once."""
    like: tuple[str, float] | None = None
    """Of the peers in the same precision the fastest, and the ratio to it."""
    unlike: list[str] = field(default_factory=list)
    """In what it learnt something else than the others."""

    def middle(self, key: str) -> float | None:
        """Return the median of a number over the runs; None where it was not measured."""
        values = [run[key] for run in self.runs if run.get(key) is not None]
        return statistics.median(values) if values else None

    def spread(self, key: str) -> float | None:
        """Return the standard deviation over the runs; None for fewer than two."""
        values = [run[key] for run in self.runs if run.get(key) is not None]
        return statistics.stdev(values) if len(values) > 1 else None

    def shapes(self) -> Iterable[Mapping[str, Any]]:
        """Return the measured shapes of the fastest of the runs."""
        measured = [shape for run in self.runs for shape in run.get("shapes", ())]
        for name in dict.fromkeys(shape["shape"] for shape in measured):
            of_it = [shape for shape in measured if shape["shape"] == name]
            yield min(of_it, key=lambda shape: float(shape["step_s"]))


def summarise(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for every contender that ran, in the order of the table."""
    rows = []
    for name, contender in CONTENDERS.items():
        own = [run for run in runs if run["name"] == name]
        if own:
            seconds = statistics.median(float(run["seconds"]) for run in own)
            rows.append(Row(contender, own, str(own[0]["precision"]), seconds))
    base = next((row for row in rows if row.contender.name == BASE), None)
    for row in rows:
        row.base_ratio = base.seconds / row.seconds if base else None
        row.like = _like_for_like(row, rows)
    _judge(rows)
    return rows


def _like_for_like(row: Row, rows: Sequence[Row]) -> tuple[str, float] | None:
    """Compare our own row with the fastest peer of its precision."""
    if not row.contender.is_ours:
        return None
    peers = [r for r in rows if not r.contender.is_ours and r.precision == row.precision]
    best = min(peers, key=lambda peer: peer.seconds, default=None)
    return (best.contender.name, best.seconds / row.seconds) if best else None


def _judge(rows: Sequence[Row]) -> None:
    """Mark who learnt something else: the middle of all contenders is what it is held to.

    Where rows are classified the loss on those held out is not judged: it moves with every order.
    """
    scored = any(row.middle("accuracy") is not None for row in rows)
    held_out = ("accuracy", SCORE_TOLERANCE) if scored else ("eval_loss", LOSS_TOLERANCE)
    for key, most in (("train_loss", LOSS_TOLERANCE), held_out):
        values = {row.contender.name: row.middle(key) for row in rows}
        known = [value for value in values.values() if value is not None]
        middle = statistics.median(known) if known else 0.0
        # A loss near zero differs by much of itself and by nothing that matters.
        allowed = most if key == "accuracy" else most * max(middle, 0.3)
        for row in rows:
            value = values[row.contender.name]
            if value is not None and not abs(value - middle) <= allowed:  # NaN differs too
                row.unlike.append(f"{key} {value:.3f}, the others' middle is {middle:.3f}")
