"""The lives of a run: one for each time that it was started, and where their time went.

`timesheet.jsonl` holds one JSON object a line, appended, so that a killed run has a record too. A
"begin" line opens each life: its plan and settings. "time" lines follow, each with all seconds of
that life so far; an "end" line is the last one of a life that was not killed. A "failed" line
is another rank's: it says which error ended it, where the main rank may never come to say so.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anytrain.core.errors import BadInput
from anytrain.core.records.lines import Appended, as_file

TIMESHEET = "timesheet.jsonl"


@dataclass(slots=True)
class Life:
    """One life of a run, from its start to its end or its kill."""

    began: dict[str, Any]
    """What was known at its begin: plan, settings, first step, process."""
    last: dict[str, Any] = field(default_factory=dict)
    """What its newest line says: step, seconds by name, memory, shapes."""
    revisions: list[dict[str, Any]] = field(default_factory=list)
    """The choices of the plan that moved, in their order."""
    times: list[dict[str, Any]] = field(default_factory=list)
    """All that was written after its begin, the oldest first."""

    failure: dict[str, Any] = field(default_factory=dict)
    """What another rank than the main one said of its failure, the first that did."""

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by name."""
        found = _object(self.last.get("seconds"))
        return {str(k): known for k, s in found.items() if (known := number(s)) is not None}

    @property
    def end_step(self) -> int:
        """The step that it is known to have come to."""
        return _whole(self.last.get("step"), _whole(self.began.get("step"), 0))

    @property
    def num_steps(self) -> int:
        """Optimizer steps of this life."""
        return self.end_step - _whole(self.began.get("step"), 0)

    def passed(self, name: str) -> float:
        """Return how much a clock that its lines tell went on in it; 0 where they do not."""
        first, last = number(self.began.get(name)), number(self.last.get(name))
        return 0.0 if first is None or last is None else last - first

    @property
    def state(self) -> str:
        """How it stands: "running", or how it ended.

        "finished", "failed", "stopped" (by a signal or a key), "ended" (with its process, which
        never said how), "killed", or "unknown": only the host that it runs on can tell whether a
        run that has not ended is still there.
        """
        found = str(self.last["how"]) if "how" in self.last else standing(self.began)
        return "failed" if self.failure and found not in ("finished", "running") else found

    @property
    def error(self) -> str | None:
        """By which error it failed, where that is known; with the rank that it was raised on."""
        if isinstance(told := self.failure.get("error"), str):
            return f"rank {_whole(self.failure.get('rank'), 0)}: {told}"
        own = self.last.get("error")
        return own if isinstance(own, str) else None

    @property
    def heard(self) -> float | None:
        """When it last wrote, in seconds since the epoch; None where it does not say."""
        return number(self.last.get("time", self.began.get("time")))

    def choice(self, name: str) -> tuple[str, str]:
        """Return the newest value of one of the plan's choices, and the reason for it."""
        found = _object(_object(self.began.get("plan")).get(name))
        for revision in self.revisions:
            if revision.get("choice") == name:
                found = revision
        return str(found.get("value", "")), str(found.get("because", ""))


def read(folder: str | os.PathLike[str]) -> list[Life]:
    """Return the lives of the run in a folder, the oldest first; refuse a folder without any."""
    path = Path(folder) / TIMESHEET
    if not as_file(path).exists():
        raise no_record(folder, f"it holds no {TIMESHEET}, which a run writes from its first step")
    lives: list[Life] = []
    add_lines(lives, Appended(path).new()[1])
    if not lives or not lives[-1].last:
        raise BadInput(
            f"The record in {path} says nothing yet.",
            why="no step has been taken yet, or the file is damaged.",
            fix="wait for the run's first seconds of training, or pass another folder.",
        )
    return lives


def add_lines(lives: list[Life], entries: Iterable[dict[str, Any]]) -> None:
    """Tell the lives so far what a timesheet's next lines say."""
    for entry in entries:
        if entry.get("kind") == "begin":
            lives.append(Life(entry))
        elif lives and entry.get("kind") == "failed":
            lives[-1].failure = lives[-1].failure or entry
        elif lives:
            moved = entry.pop("revisions", [])
            known = moved if isinstance(moved, list) else []
            lives[-1].revisions.extend(one for one in known if isinstance(one, dict))
            lives[-1].last = entry
            lives[-1].times.append(entry)


def counted(lives: Sequence[Life]) -> list[Life]:
    """Return the lives that a run's history is made of: the newest, and those it goes on from.

    A life that began at step 0 makes all before it another story.
    """
    fresh = [n for n, life in enumerate(lives) if not number(life.began.get("step"))]
    return list(lives[fresh[-1] if fresh else 0 :])


def together(lives: Sequence[Life]) -> Life:
    """Return lives of one run as if they were one: what adds up added, all else the newest's."""
    newest = lives[-1]
    if len(lives) == 1:
        return newest
    seconds: dict[str, float] = {}
    for life in lives:
        for name, spent in life.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + spent
    last = {**newest.last, "seconds": seconds}
    began = {**newest.began, "step": newest.end_step - sum(life.num_steps for life in lives)}
    for name in ("time", "cpu_seconds"):
        if (end := number(last.get(name))) is not None:
            began[name] = end - sum(life.passed(name) for life in lives)
    hidden = [number(life.last.get("hidden")) or 0.0 for life in lives]
    peaks = [number(life.last.get("peak_bytes")) for life in lives]
    shapes = [shape for life in lives for shape in _list(life.last.get("shapes"))]
    last |= {
        "hidden": sum(hidden),
        "peak_bytes": max((peak for peak in peaks if peak is not None), default=None),
        "shapes": list(dict.fromkeys(map(str, shapes))) or newest.last.get("shapes"),
    }
    return Life(began, last, [moved for life in lives for moved in life.revisions])


def no_record(folder: str | os.PathLike[str], lacks: str) -> BadInput:
    """Return the refusal of a folder that holds no record."""
    path = Path(folder)
    other = f"{path} is a file" if path.is_file() else f"there is no such folder: {path}"
    return BadInput(
        f"There is no record of a run in {path}.",
        why=f"{lacks if path.is_dir() else other}.",
        fix="pass the output_dir of a Trainer or of `anytrain glue`, or the project_dir of an "
        "Accelerator.",
    )


def standing(began: dict[str, Any]) -> str:
    """Return whether the process that wrote this is "running" or "killed"; "unknown" elsewhere."""
    here = socket.gethostname()
    if began.get("host", here) != here:
        return "unknown"
    return "running" if _is_alive(began) else "killed"


def _is_alive(began: dict[str, Any]) -> bool:
    """Whether the process of this host that wrote this is still there."""
    import psutil

    try:
        process = psutil.Process(int(began.get("pid", -1)))
        if process.status() == psutil.STATUS_ZOMBIE:  # dead, and its parent has not looked yet
            return False
        return process.create_time() <= float(began.get("time", 0.0))
    except (psutil.Error, ValueError, TypeError, OverflowError):
        return False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """Return a number that arithmetic can be done with; None for what is none, in a damaged file.

    >>> number(3), number(True), number("3"), number(float("inf")), number(10**400)
    (3.0, None, None, None, None)
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _whole(value: Any, otherwise: int) -> int:
    found = number(value)
    return otherwise if found is None else int(found)
