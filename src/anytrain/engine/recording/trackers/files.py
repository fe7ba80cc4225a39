"""Write a run's values into plain files that survive a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anytrain.engine.recording.trackers.values import settings


def append(path: Path, line: str) -> None:
    """Add a line to the file.

    A line that a crash or a full disk tore off stays alone: the next one starts on its own.
    """
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(f"{line}\n".encode())


def replace(path: Path, text: str) -> None:
    """Put the text in the file, whole or not at all."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def store_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Write a run's settings as `config.json`."""
    replace(folder / "config.json", to_json(settings(values), indent=2) + "\n")


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Return valid JSON for any values.

    JSON has no NaN and no infinity: they become the strings that `float()` reads back.

    >>> to_json({"loss": float("nan"), "best": float("inf"), "sizes": [1, 2]})
    '{"loss": "NaN", "best": "Infinity", "sizes": [1, 2]}'
    """
    return json.dumps(_finite(values), indent=indent, default=_listed, ensure_ascii=False)


def _listed(value: Any) -> Any:
    """Return arrays and tensors as lists, and the rest as its text."""
    return _finite(value.tolist()) if hasattr(value, "tolist") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
