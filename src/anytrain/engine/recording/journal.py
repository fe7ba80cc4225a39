"""Keep a run's log as one JSON object a line, so that the file tells one history."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anytrain.core.errors import Notice
from anytrain.engine.recording.trackers.files import append, replace, to_json


class Journal:
    """A file of log entries: `step`, `epoch`, `time` (seconds since 1970) and the values.

    Each entry is written through at once. NaN and infinities are the strings that `float()`
    reads. A disk that fails is told of once, and stops nothing. Only the main rank writes.
    """

    def __init__(self, path: str | os.PathLike[str], is_main: bool = True) -> None:
        self.path = Path(path)
        self._is_main = is_main
        self._has_complained = False
        self._has_begun = False
        self._before_training: list[str] = []

    def begin(self, step: int) -> None:
        """Drop what an earlier attempt wrote beyond `step`, where training goes on from.

        From step 0 all of it goes, but for what this journal itself wrote at step 0: figures
        of the untrained model.
        """
        if not self._is_main:
            return
        prelude, self._before_training = self._before_training, []
        self._has_begun = True
        self._safely(lambda: self._rewrite(step, prelude))

    def write(self, step: int, epoch: float | None, values: Mapping[str, Any]) -> None:
        """Add an entry."""
        if not self._is_main:
            return
        place = {"step": step, "epoch": epoch, "time": round(time.time(), 3)}
        rest = {name: value for name, value in values.items() if name not in place}
        line = to_json({**place, **rest})
        if step == 0 and not self._has_begun:
            self._before_training.append(line)
        self._safely(lambda: self._append(line))

    def _append(self, line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append(self.path, line)

    def _rewrite(self, step: int, prelude: list[str]) -> None:
        if not self.path.exists():
            return
        before = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in before if 0 <= _step(line) <= step] if step > 0 else prelude
        if kept != before:
            replace(self.path, "".join(f"{line}\n" for line in kept))

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                warnings.warn(
                    f"Cannot write {self.path}: {error}. Training goes on; log entries may be "
                    "missing there.",
                    Notice,
                    stacklevel=4,
                )


def _step(line: str) -> int:
    """Return the step of an entry; -1 for a line that is none, torn by a crash for example."""
    try:
        entry = json.loads(line)
    except ValueError:
        return -1
    step = entry.get("step") if isinstance(entry, dict) else None
    return step if isinstance(step, int) else -1
