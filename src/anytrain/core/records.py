"""The record that a run keeps of itself: what is in it, and how it is read back.

One JSON object a line, appended, so that a killed run has a record too. A "begin" line opens each
life of a run: its plan and settings. "time" lines follow, each with all seconds of that life so
far; an "end" line is the last one of a life that was not killed.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anytrain.core.errors import BadInput

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

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by name."""
        return dict(self.last.get("seconds", {}))

    @property
    def num_steps(self) -> int:
        """Optimizer steps of this life."""
        first = int(self.began.get("step", 0))
        return int(self.last.get("step", first)) - first

    @property
    def state(self) -> str:
        """How it stands: "finished", "failed", "ended", "running", "killed", or "unknown".

        Only the host that it runs on can tell whether a run that has not ended is still there.
        """
        if "how" in self.last:
            return str(self.last["how"])
        if self.began.get("host", _here()) != _here():
            return "unknown"
        return "running" if _is_alive(self.began) else "killed"

    @property
    def heard(self) -> float | None:
        """When it last wrote, in seconds since the epoch; None where it does not say."""
        found = self.last.get("time", self.began.get("time"))
        return None if found is None else float(found)

    def choice(self, name: str) -> tuple[str, str]:
        """Return the newest value of one of the plan's choices, and the reason for it."""
        found = self.began.get("plan", {}).get(name, {})
        for revision in self.revisions:
            if revision.get("choice") == name:
                found = revision
        return str(found.get("value", "")), str(found.get("because", ""))


def read(folder: str | os.PathLike[str]) -> list[Life]:
    """Return the lives of the run in a folder, the oldest first; refuse a folder without any."""
    path = Path(folder) / TIMESHEET
    if not path.is_file():
        raise BadInput(
            f"There is no record of a run in {os.fspath(folder)}.",
            why=f"there is no such folder: {Path(folder)}."
            if not Path(folder).is_dir()
            else f"it holds no {TIMESHEET}, which a run writes from its first step on.",
            fix="pass the output_dir of a Trainer or of `anytrain glue`, or the project_dir of an "
            "Accelerator.",
        )
    lives: list[Life] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        entry = _entry(line)
        if entry.get("kind") == "begin":
            lives.append(Life(entry))
        elif entry and lives:
            lives[-1].revisions.extend(entry.pop("revisions", []))
            lives[-1].last = entry
    if not lives or not lives[-1].last:
        raise BadInput(
            f"The record in {path} says nothing yet.",
            why="no step has been taken, or the file is damaged.",
            fix="wait for the run's first seconds of training, or pass another folder.",
        )
    return lives


def _entry(line: str) -> dict[str, Any]:
    """Return what a line says; nothing where a kill has torn it."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _here() -> str:
    return socket.gethostname()


def _is_alive(began: dict[str, Any]) -> bool:
    """Whether the process of this host that wrote this is still there."""
    import psutil

    try:
        born = psutil.Process(int(began.get("pid", -1))).create_time()
    except (psutil.Error, ValueError):
        return False
    return born <= float(began.get("time", 0.0))
