"""`anytrain report`: a run as one HTML file that can be mailed. Loads no torch."""

from __future__ import annotations

from pathlib import Path

import typer

from anytrain.cli.options import RUN, newest_run
from anytrain.core.text import one_line

OUTPUT = typer.Option(
    None, "-o", "--output", help="The file to write. Default: report.html in the run's folder."
)
OPEN = typer.Option(False, "--open", help="Open it in the browser.")


def report(run: Path | None = RUN, output: Path | None = OUTPUT, opens: bool = OPEN) -> None:
    """Write a run's report: curves, time, evaluation, plan, and how to reproduce it.

    It is one file that needs no network. The run may be over, going on, or killed. Of a search, it
    compares the trials, and each trial gets its own report, too.
    """
    from anytrain.doors.reading import write

    pages = write(newest_run("report") if run is None else run, output)
    for path in pages:
        typer.echo(one_line(typer.format_filename(path)))  # a name of a file need not be text
    if opens:
        import webbrowser

        webbrowser.open(pages[0].resolve().as_uri())
