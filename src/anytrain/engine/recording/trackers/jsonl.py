"""Record a run as one JSON object a line; needs no library."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from anytrain.core import documents
from anytrain.core.documents import as_file
from anytrain.engine.recording.trackers.files import (
    append,
    is_after,
    replace,
    store_config,
    to_json,
)
from anytrain.engine.recording.trackers.general import GeneralTracker
from anytrain.engine.recording.trackers.values import read


class JSONLTracker(GeneralTracker):
    """Write `metrics.jsonl` and `config.json` into `logging_dir/run_name`.

    Each line holds `_step`, `_timestamp` (seconds since 1970) and what was logged. A run that is
    started again goes on at the end of the file; one that goes on from an earlier step takes back
    what was written after that.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir) / run_name / "metrics.jsonl"
        self._goes_on_at: int | None = None

    @property
    def tracker(self) -> Path:
        """The file that is written."""
        return self.path

    def go_on(self, run: str, step: int) -> None:
        """Take back what an earlier life of the run wrote after that step: it comes again."""
        self._goes_on_at = step

    def kept_as(self) -> str | None:
        """Return the folder's name."""
        return self.run_name

    def start(self) -> None:
        """Make the folder and the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        if self._goes_on_at is not None:
            # Not splitlines(): JSON may hold other characters that it takes for an end.
            lines = as_file(self.path).read_text(encoding="utf-8").split("\n")
            known = [line for line in lines if not is_after(_step(line), self._goes_on_at)]
            if len(known) < len(lines):
                replace(self.path, "\n".join(known))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the run's settings as `config.json`."""
        store_config(self.path.parent, values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add a line."""
        append(self.path, to_json({"_step": step, "_timestamp": time.time(), **read(values)}))


def _step(line: str) -> object:
    try:
        found = documents.from_json(line)
    except ValueError:  # torn
        return None
    return found.get("_step") if isinstance(found, dict) else None
