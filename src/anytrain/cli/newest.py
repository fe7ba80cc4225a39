"""What a command takes that is given no run: the newest below the current folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from anytrain.core.text import one_line
from anytrain.insight.report.newest import named, newest


def run(
    command: str, holds: Callable[[Path], bool] = lambda run: True, what: str = "a record"
) -> Path:
    """Return the newest run below the current folder that `holds` what is read, and say which."""
    return runs(command, 1, holds, what)[0]


def runs(
    command: str,
    count: int,
    holds: Callable[[Path], bool] = lambda run: True,
    what: str = "a record",
) -> list[Path]:
    """Return the newest runs below the current folder, the newest last, and say which."""
    found = newest(count, f"anytrain {command}{' PATH' * count}", holds, what)
    taken = "the newest run" if count == 1 else "the two newest runs"
    told = f"taking {named(found)}: {taken} below {one_line(Path.cwd())}."
    say(f"anytrain: {told}")
    return found


def say(text: str) -> None:
    """Say on stderr what was taken."""
    typer.echo(text, err=True)
