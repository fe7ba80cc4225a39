"""Write the record of a run by hand, line by line, as a run would.

Import it as `from made_records import Record`; tests/ is on the path.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any


class Record:
    """A run's folder, and a clock that goes on when it is told to.

    It begins now, and so after this process, whose own the run is unless told: what a process
    wrote before it was born is another's, who had the same number.
    """

    def __init__(self, folder: Path, *, ago_s: float = 0.0) -> None:
        self.folder = folder
        self.now = time.time() - ago_s

    def begin(self, step: int = 0, *, pid: int | None = None, **more: Any) -> None:
        """Start a life, by default of this process."""
        line = {
            "kind": "begin",
            "time": self.now,
            "pid": os.getpid() if pid is None else pid,
            "host": socket.gethostname(),
            "step": step,
            "max_steps": 1000,
            "samples_per_step": 32,
            **more,
        }
        self._append("metrics.jsonl", {"step": step, "time": self.now, "event": "begin"})
        self._append("timesheet.jsonl", line)

    def train(self, steps: range, *, seconds: float = 1.0, **seconds_by_name: float) -> None:
        """Take steps of some seconds each, with a log entry after each tenth."""
        for step in steps:
            self.now += seconds
            if step % 10 == 0:
                self.log(step, loss=1 / (1 + step), learning_rate=1e-3)
        spent = {"start": 5.0, "step": 80.0, "data": 15.0, **seconds_by_name}
        self._append(
            "timesheet.jsonl",
            {"kind": "time", "time": self.now, "step": steps[-1], "seconds": spent,
             "peak_bytes": 3 * 2**30},
        )  # fmt: skip

    def log(self, step: int, **values: Any) -> None:
        """Write an entry of the log."""
        line = {"step": step, "epoch": step / 100, "time": self.now, **values}
        self._append("metrics.jsonl", line)

    def event(self, kind: str, **more: Any) -> None:
        """Write an event."""
        self._append("events.jsonl", {"time": self.now, "kind": kind, **more})

    def end(self, step: int, how: str = "finished") -> None:
        """End the life."""
        spent = {"start": 5.0, "step": 80.0, "data": 15.0}
        line = {"kind": "end", "how": how, "time": self.now, "step": step, "seconds": spent}
        self._append("timesheet.jsonl", line)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
