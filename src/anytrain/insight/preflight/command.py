"""Make a preflight and tell it: in the terminal, as JSON, as a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anytrain.core.errors import BadInput
from anytrain.core.text import safe_console
from anytrain.insight.preflight import printed
from anytrain.insight.preflight.report import Report
from anytrain.insight.preflight.run import Start, preflight
from anytrain.insight.preflight.targets import parse_targets


@dataclass(frozen=True, slots=True)
class Ways:
    """Where a report goes, besides the terminal."""

    json_file: str | None = None
    """A file; "-" prints it instead of the tables."""
    html_file: Path | None = None


def tell(
    command: Sequence[str],
    targets: Sequence[str] = (),
    ways: Ways = Ways(),
    start: Start = Start(),
    *,
    quick: bool = False,
    thorough: bool = False,
) -> Report:
    """Trace a command for targets such as "mps:16GB", tell what was found, and return it."""
    for path in (ways.json_file, ways.html_file):
        if path is not None and path != "-":
            _check_writable(Path(path))
    aside = safe_console(stderr=True, markup=False)
    report = preflight(
        command,
        parse_targets(tuple(targets)),
        start,
        quick=quick,
        thorough=thorough,
        say=lambda text: aside.print(f"anytrain: {text}", style="dim"),
    )
    if ways.json_file == "-":
        sys.stdout.write(report.as_json() + "\n")
    else:
        printed.show(report, safe_console(markup=False))
        if ways.json_file is not None:
            Path(ways.json_file).write_text(report.as_json() + "\n", encoding="utf-8")
    if ways.html_file is not None:
        ways.html_file.write_text(report.as_html(), encoding="utf-8")
        aside.print(f"anytrain: the page is {ways.html_file}")
    return report


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is traced."""
    was_there = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise BadInput(
            f"Cannot write the report to {path}.",
            why=f"{error.strerror or error}.",
            fix="pass the path of a file in a folder that is there.",
        ) from error
    if not was_there:
        path.unlink()
