"""Write a run's record so that no disk can stop the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anytrain.core.errors import Notice
from anytrain.engine.recording.trackers.files import append, replace, to_json


class Disk:
    """Appends and replaces files; the first failure is told, and none is raised."""

    def __init__(self) -> None:
        self._has_complained = False

    def append(self, path: Path, entry: Mapping[str, Any]) -> None:
        """Add an entry as a line of its own."""
        line = to_json(entry)
        self._attempt(path, lambda: append(path, line))

    def replace(self, path: Path, value: Mapping[str, Any]) -> None:
        """Put the value in the file, whole or not at all."""
        text = to_json(value, indent=2) + "\n"
        self._attempt(path, lambda: replace(path, text))

    def _attempt(self, path: Path, write: Callable[[], None]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write()
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                warnings.warn(
                    f"Cannot write {path}: {error}. Training goes on; the record of this run may "
                    "lack entries.",
                    Notice,
                    stacklevel=4,
                )
