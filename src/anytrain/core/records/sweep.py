"""What a search for good settings keeps of itself in its folder: each trial, and how it ended."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytrain.core.records.life import number
from anytrain.core.records.lines import Replaced
from anytrain.core.records.run import is_run

SWEEP = "sweep.json"


@dataclass(frozen=True, slots=True)
class Trial:
    """One training of a search."""

    number: int
    folder: Path
    """Its own, with the record of its run."""
    state: str
    """complete, pruned, failed; running where it has not said how it ended."""
    parameters: Mapping[str, Any]
    objectives: tuple[float, ...]
    """What it is compared by; of one that was given up, how it stood."""

    @property
    def is_complete(self) -> bool:
        """Whether it counts."""
        return self.state == "complete" and all(map(math.isfinite, self.objectives or (math.nan,)))


@dataclass(frozen=True, slots=True)
class Sweep:
    """A search: its folder, and the trials in the order in which they were begun."""

    folder: Path
    directions: tuple[str, ...]
    """minimize or maximize, for each objective."""
    trials: tuple[Trial, ...]

    def ranked(self) -> list[Trial]:
        """Return the trials, the best by the first objective first, and then the rest."""
        sign = -1.0 if self.directions[0] == "maximize" else 1.0
        counted = [trial for trial in self.trials if trial.is_complete]
        rest = [trial for trial in self.trials if not trial.is_complete]
        return sorted(counted, key=lambda trial: sign * trial.objectives[0]) + rest

    @property
    def best(self) -> Trial | None:
        """The best trial; None where there are several objectives, or nothing to compare."""
        first = self.ranked()[:1] if len(self.directions) == 1 else []
        return first[0] if first and first[0].is_complete else None

    def recorded(self) -> list[Trial]:
        """Return the trials whose folder holds the record of a run."""
        return [trial for trial in self.trials if is_run(trial.folder)]


def open_sweep(folder: str | os.PathLike[str]) -> Sweep | None:
    """Return the search that a folder holds; None where it holds none."""
    file = Replaced(Path(folder) / SWEEP)
    file.look()
    entries = file.value.get("trials")
    if not isinstance(entries, list):
        return None
    asked = file.value.get("directions")
    directions = tuple(str(each) for each in asked) if isinstance(asked, list) else ()
    trials = (_trial(Path(folder), entry) for entry in entries if isinstance(entry, dict))
    return Sweep(Path(folder), directions or ("minimize",), tuple(filter(None, trials)))


def _trial(root: Path, entry: dict[str, Any]) -> Trial | None:
    which, place = number(entry.get("number")), entry.get("folder")
    if which is None or not math.isfinite(which) or not isinstance(place, str):
        return None
    if "\0" in place or ".." in Path(place).parts or Path(place).is_absolute():
        place = f"run-{int(which)}"  # a report is written there: nowhere but inside
    parameters, values = entry.get("parameters"), entry.get("objectives")
    found = [number(each) for each in values] if isinstance(values, list) else []
    known = tuple(math.nan if each is None else each for each in found)
    named = {str(k): v for k, v in parameters.items()} if isinstance(parameters, dict) else {}
    return Trial(int(which), root / place, str(entry.get("state")), named, known)
