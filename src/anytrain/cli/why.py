"""`anytrain why`: where a run's time goes, and what to do about it. Loads no torch."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from anytrain.cli.options import RUN, newest_run, say

JSON = typer.Option(False, "--json", help="Print one JSON object instead of a table.")


def why(run: Path | None = RUN, as_json: bool = JSON) -> None:
    """Show where a run's time went, and one remedy where something takes too much.

    The run may be over, going on, or killed; whether one on another host still goes on is not
    known here. Of a run that was resumed, all its starts count together; of a search, the newest
    trial is taken.
    """
    from anytrain.core.text import safe_console
    from anytrain.doors import reading
    from anytrain.insight.report.run_folders import has_times, newest_trial

    run = newest_run("why", has_times) if run is None else run
    found = reading.why(newest_trial(run, say, "why"))
    if as_json:
        typer.echo(json.dumps(found.told, indent=2))
    else:
        found.print(safe_console())
