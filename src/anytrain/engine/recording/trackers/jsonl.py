"""Record a run as one JSON object a line; needs no library."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from anytrain.engine.recording.trackers.files import append, store_config, to_json
from anytrain.engine.recording.trackers.general import GeneralTracker
from anytrain.engine.recording.trackers.values import read


class JSONLTracker(GeneralTracker):
    """Write `metrics.jsonl` and `config.json` into `logging_dir/run_name`.

    Each line holds `_step`, `_timestamp` (seconds since 1970) and what was logged. A run that is
    started again goes on at the end of the file.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir) / run_name / "metrics.jsonl"

    @property
    def tracker(self) -> Path:
        """The file that is written."""
        return self.path

    def start(self) -> None:
        """Make the folder and the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the run's settings as `config.json`."""
        store_config(self.path.parent, values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add a line."""
        append(self.path, to_json({"_step": step, "_timestamp": time.time(), **read(values)}))
