"""`anytrain why`: where a run's time goes, and what to do about it. Loads no torch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import typer

RUN = typer.Argument(help="A run's output_dir; an Accelerator's project_dir.")
_SHOWN = 0.0005
JSON = typer.Option(False, "--json", help="Print one JSON object instead of a table.")


def why(run: Path = RUN, as_json: bool = JSON) -> None:
    """Show where a run's time went, and one remedy where something takes too much.

    The run may be over, going on, or killed; whether one on another host still goes on is not
    known here. Of a run that was resumed, its last start counts.
    """
    from anytrain.core import records
    from anytrain.insight.report.why import tell

    lives = records.read(run)
    told = {"run": str(run), "starts": len(lives), **tell(lives[-1])}
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        _print(told)


def _print(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from anytrain.insight.report.why import MEANING

    console = Console(highlight=False)
    console.print(Text(_heading(told), style="bold"), soft_wrap=True)
    table = Table("time", "seconds", "share", "what")
    for column in table.columns[1:3]:
        column.justify = "right"
    for name, share in told["shares"].items():
        if share < _SHOWN:
            continue
        row = (name, f"{told['seconds'][name]:.1f}", f"{share:.1%}", MEANING.get(name, ""))
        table.add_row(*map(Text, row))
    console.print(table)
    for line in _facts(told):
        console.print(Text(line), soft_wrap=True)
    finding = told["finding"]
    if finding is None:
        console.print(Text("Nothing takes more than its due."))
    else:
        console.print(Text(f"{finding['share']:.0%} {MEANING[finding['name']]}.", style="bold"))
        console.print(Text(finding["remedy"]), soft_wrap=True)


def _heading(told: dict[str, Any]) -> str:
    of = "" if told["max_steps"] is None else f" of {told['max_steps']}"
    times = "" if told["starts"] == 1 else f", the last of {told['starts']} starts"
    wall = f"{told['wall_seconds']:.1f} s"
    state = _heard(told) if told["state"] == "unknown" else told["state"]
    return f"{told['run']}: {state} at step {told['step']}{of} after {wall}{times}"


def _heard(told: dict[str, Any]) -> str:
    """Say where a run of another host is, and when it last wrote."""
    when = "" if told["heard"] is None else time.strftime(" %F %T", time.localtime(told["heard"]))
    return f"on {told['host']}, last heard of{when},"


def _facts(told: dict[str, Any]) -> list[str]:
    """Return what else is known, a line each."""
    found = [f"{name}: {value} ({because})" for name, (value, because) in told["plan"].items()]
    if told["samples_per_second"]:
        found.append(f"samples/s between batches: {told['samples_per_second']:.1f}")
    if told["peak_bytes"]:
        found.append(f"peak memory: {told['peak_bytes'] / 2**30:.2f} GiB")
    if told["shapes"]:
        found.append(f"shapes: {len(told['shapes'])} ({', '.join(told['shapes'][:8])})")
    if told["hidden_seconds"] >= 0.05:
        found.append(
            f"{told['hidden_seconds']:.1f} s of waiting for data cost nothing: the device was busy"
        )
    found.extend(
        f"at step {each['step']}: {each['choice']} became {each['value']} ({each['because']})"
        for each in told["revisions"]
    )
    return found
