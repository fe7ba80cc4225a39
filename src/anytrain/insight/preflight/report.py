"""The report of a preflight: for each target findings, forecasts and one verdict."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytrain.core import documents
from anytrain.insight.preflight.findings import SEVERITIES, Finding, Severity
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Moment, TracedJob

if TYPE_CHECKING:
    from anytrain.insight.preflight.batch_search import Fit
    from anytrain.insight.preflight.memory import Forecast
    from anytrain.insight.preflight.step_time import Duration

FILE = "preflight.json"
"""Beside a run: what was foretold of it, for the day on which it turns out otherwise."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What awaits the run on one target."""

    target: Target
    job: TracedJob
    findings: tuple[Finding, ...] = ()
    """The gravest first."""
    memory: Forecast | None = None
    fits: tuple[Fit, ...] = ()
    """The largest batch of each setting that was tried."""
    time: Duration | None = None
    recorded_time: Duration | None = None
    """The same step as one recording, where the target can have that."""
    compiled: Any = None
    """What the target's own compiler said of the step, where it was asked."""
    timeline: tuple[Moment, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be seen."""
    trace_s: float = 0.0

    @property
    def runs(self) -> bool:
        """Whether nothing that was found ends the run or spoils it."""
        return not any(each.severity == "error" for each in self.findings)

    @property
    def has_room(self) -> bool | None:
        """Whether it fits the memory; the compiler's word counts most, None where none knows."""
        told = getattr(self.compiled, "fits", None)
        if told is None and self.memory is not None:
            told = self.memory.fits
        return told

    @property
    def verdict(self) -> str:
        """What to expect, in a few words."""
        room = {True: "fits", False: "does not fit", None: "memory not judged"}[self.has_room]
        how = "runs" if self.runs else "fails"
        if self.runs and any(each.kind == "trace" for each in self.findings):
            how = "not seen to its end"
        return f"{how}, {room}"

    def count(self, severity: Severity) -> int:
        """Return how many findings are that grave."""
        return sum(each.severity == severity for each in self.findings)


@dataclass(frozen=True, slots=True)
class Report:
    """All that a preflight has found."""

    command: tuple[str, ...]
    outlooks: tuple[Outlook, ...]

    def fails_on(self, severity: Severity) -> bool:
        """Whether something at least that grave was found."""
        grave = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return any(each.severity in grave for o in self.outlooks for each in o.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "command": list(self.command),
            "targets": [
                {
                    "verdict": outlook.verdict,
                    "runs": outlook.runs,
                    "fits": outlook.has_room,
                    **_plain(outlook),
                }
                for outlook in self.outlooks
            ],
        }

    def as_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def as_html(self) -> str:
        """Return a page that needs nothing else."""
        from anytrain.insight.preflight.rendering import page

        return page(self)

    def __str__(self) -> str:
        from anytrain.insight.preflight.rendering import text

        return text(self)

    def __repr__(self) -> str:
        told = "; ".join(f"{o.target.name}: {o.verdict}" for o in self.outlooks)
        return f"<Report {told}>"

    def _repr_html_(self) -> str:  # what a notebook shows
        from anytrain.insight.preflight.rendering import fragment

        return fragment(self)


def keep(report: Report) -> list[Path]:
    """Write what was foretold of the memory into the run's folder, where it has one."""
    kept: dict[str, dict[str, Any]] = {}
    for outlook in report.outlooks:
        if outlook.memory is not None and outlook.job.output_dir:
            told = {
                "target": outlook.target.name,
                "batch_size": outlook.memory.batch_size,
                "precision": outlook.memory.precision,
                "peak_bytes": outlook.memory.peak_bytes,
                "needed_bytes": outlook.memory.needed_bytes,
                "fits": outlook.memory.fits,
                "largest_batch": max((fit.largest for fit in outlook.fits), default=None),
            }
            kept.setdefault(outlook.job.output_dir, {})[outlook.target.kind] = told
    paths = [Path(folder) / FILE for folder in kept]
    for path, told in zip(paths, kept.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    return paths


def foretold(folder: str | os.PathLike[str] | None, kind: str) -> Mapping[str, Any] | None:
    """Return what a preflight foretold of the run in a folder on that kind of device, if any."""
    if folder is None:
        return None
    try:
        told = documents.from_json((Path(folder) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = told.get(kind) if isinstance(told, dict) else None
    return found if isinstance(found, dict) else None


def _plain(outlook: Outlook) -> dict[str, Any]:
    # Lengths are as many as samples, and every trace's events are millions of numbers.
    found = {f.name: _value(getattr(outlook, f.name)) for f in fields(outlook)}
    found["job"].pop("lengths", None)
    found["largest_batches"] = found.pop("fits")
    return found


def _value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, tuple):
        return [v._asdict() if hasattr(v, "_asdict") else _value(v) for v in value]
    return value
