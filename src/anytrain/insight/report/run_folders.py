"""Find the folder of a run: the newest below here, or which trial of a search is meant."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from anytrain.core import records
from anytrain.core.errors import BadInput
from anytrain.core.text import one_line

_DEPTH = 4
_MOST_FOLDERS = 20_000
_NO_RUNS = ("node_modules", "site-packages", "__pycache__")
_FILES = (records.TIMESHEET, records.METRICS, records.RUN)


def newest(
    count: int,
    example: str,
    holds: Callable[[Path], bool] = lambda run: True,
    what: str = "a record",
) -> list[Path]:
    """Return the newest runs below the current folder that `holds` takes, the newest last.

    `example` says in the error, where there are fewer, how one is named.
    """
    found = list(islice((each for each in _newest_first() if holds(each)), count))[::-1]
    if len(found) < count:
        here, it = one_line(Path.cwd()), "it" if count == 1 else "them"
        raise BadInput(
            f"There is only one run below {here}." if found else f"There is no run below {here}.",
            why=f"it is {named(found)}, and two are needed."
            if found
            else f"no folder up to {_DEPTH} levels below holds a run with {what}.",
            fix=f"name {it}: `{example}`, or go to the folder that holds {it}.",
        )
    return found


def newest_below(folder: Path, say: Callable[[str], None]) -> Path:
    """Return the newest run below a folder of runs, and say so; any other folder as it is."""
    if records.is_run(folder) or not folder.is_dir():
        return folder
    found = _newest_first(folder)
    if not found:
        return folder
    more = f" of {len(found)}" if len(found) > 1 else ""
    say(one_line(f"anytrain: taking {found[0]}: the newest run{more} below {folder}."))
    return found[0]


def has_times(run: Path) -> bool:
    """Whether a folder holds the times of a run."""
    return (run / records.TIMESHEET).exists()


def named(runs: list[Path]) -> str:
    """Return the folders as a person names them."""
    return " and ".join(one_line(each) if each.parts else "this folder" for each in runs)


def _newest_first(root: Path = Path()) -> list[Path]:
    """Return the folders with a run's record, by the time that was last written to it."""
    last = {folder: time for folder in _folders(root) if (time := _written(folder)) is not None}
    return sorted(last, key=lambda folder: (-last[folder], str(folder)))


def _folders(root: Path) -> Iterator[Path]:
    """Yield a folder and those below it that may hold runs, a few levels deep."""
    level, count = [root], 0
    for _ in range(_DEPTH + 1):
        below = []
        for folder in level:
            count += 1
            if count > _MOST_FOLDERS:
                raise BadInput(
                    f"Cannot look for runs below {one_line(root.absolute())}.",
                    why=f"there are more than {_MOST_FOLDERS:,} folders.",
                    fix="name the run's folder, or go to one that holds runs.",
                )
            yield folder
            below += _inside(folder)
        level = below


def _inside(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            names = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name[0] != "." and name not in _NO_RUNS]


def _written(folder: Path) -> float | None:
    times = []
    for name in _FILES:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def search_in(folder: Path) -> records.Sweep | None:
    """Return the search in a folder that holds no run of its own."""
    return None if records.is_run(folder) else records.open_sweep(folder)


def newest_trial(folder: Path, say: Callable[[str], None], command: str) -> Path:
    """Return the newest trial of a search's folder, and say so; any other folder as it is."""
    sweep = search_in(folder)
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


def trials_of(folder: Path) -> list[Path]:
    """Return the trials of a search's folder, the best first; any other folder as it is."""
    sweep = search_in(folder)
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
