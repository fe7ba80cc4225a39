"""The folder of a search, where that of a run is meant: which of its trials is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from anytrain.core import records
from anytrain.core.errors import BadInput
from anytrain.core.text import one_line


def of(folder: Path) -> records.Sweep | None:
    """Return the search in a folder that holds no run of its own."""
    return None if records.is_run(folder) else records.open_sweep(folder)


def newest(folder: Path, say: Callable[[str], None], command: str) -> Path:
    """Return the newest trial of a search's folder, and say so; any other folder as it is."""
    sweep = of(folder)
    if sweep is None:
        return folder
    trials = _recorded(sweep)
    taken, others = trials[-1], trials[:-1]
    count = f"{len(sweep.trials)} trial{'s' if len(sweep.trials) > 1 else ''}"
    text = f"anytrain: {folder} is a search of {count}; taking the newest, {taken.folder.name}."
    if others:
        best = sweep.best or others[0]
        named = best if best in others else others[0]
        which = " (the best)" if named == sweep.best else ""
        text += f" Another: anytrain {command} {named.folder}{which}."
    text += f" All: anytrain report {folder}."
    say(one_line(text))
    return taken.folder


def each(folder: Path) -> list[Path]:
    """Return the trials of a search's folder, the best first; any other folder as it is."""
    sweep = of(folder)
    if sweep is None:
        return [folder]
    recorded = _recorded(sweep)
    return [trial.folder for trial in sweep.ranked() if trial in recorded]


def _recorded(sweep: records.Sweep) -> list[records.Trial]:
    found = sweep.recorded()
    if not found:
        raise BadInput(
            f"There is no record of a run in {one_line(sweep.folder)}.",
            why="none of the trials of the search in it has a record yet.",
            fix="wait until a trial has begun, or pass the folder of a run.",
        )
    return found
