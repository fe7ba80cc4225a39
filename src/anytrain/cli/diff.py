"""`anytrain diff`: what differs between runs, and where their curves part. Loads no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import typer

from anytrain.cli import options

RUNS = typer.Argument(
    None,
    help="Two runs or more: their output_dir, an Accelerator's project_dir. Default: the two "
    "newest runs below.",
)
OUTPUT = typer.Option(None, "--output", "-o", help="Write a page there instead of printing.")
JSON = typer.Option(False, "--json", help="Print one JSON object instead of tables.")


def diff(
    runs: list[Path] | None = RUNS, output: Path | None = OUTPUT, as_json: bool = JSON
) -> None:
    """Show what differs between runs: choices, data, code, versions, hardware, curves, times.

    The first run is what the others are held against. Three runs or more are a table. The folder
    of a search stands for its trials, the best first.
    """
    from anytrain.insight.report import diff as comparison, diff_views
    from anytrain.insight.report.run_folders import trials_of

    named = [folder for run in runs or () for folder in trials_of(run)]
    opened = comparison.open_runs(named or options.newest_runs("diff", 2))
    found = comparison.compare(opened)
    if as_json:
        typer.echo(json.dumps(_spelt(found), indent=2, default=str))
    elif output is None:
        diff_views.show(found)
    if output is not None:
        diff_views.write(output, found, [comparison.curves(run) for run in opened])
        typer.echo(f"Wrote {output}", err=as_json)


def _spelt(value: Any) -> Any:
    """Return values with NaN and infinities by name: JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _spelt(inner) for key, inner in value.items()}
    return [_spelt(inner) for inner in value] if isinstance(value, list) else value
