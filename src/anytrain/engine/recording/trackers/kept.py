"""Remember which run of each tracker a training logged to, so that its resume goes on there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from anytrain.core import documents
from anytrain.core.documents import as_file
from anytrain.engine.recording.trackers.files import replace, to_json

NAME = "trackers.json"


def read(folder: str | os.PathLike[str], project: str) -> dict[str, str]:
    """Return the trackers' runs by name; none where nothing readable is kept for the project."""
    try:
        kept = documents.from_json(as_file(Path(folder) / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    runs = kept.get("runs") if isinstance(kept, dict) and kept.get("project") == project else None
    known = runs.items() if isinstance(runs, dict) else ()
    return {name: run for name, run in known if isinstance(run, str)}


def write(folder: str | os.PathLike[str], project: str, runs: Mapping[str, str]) -> None:
    """Keep the trackers' runs for the project."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    replace(Path(folder) / NAME, to_json({"project": project, "runs": runs}, indent=2) + "\n")
