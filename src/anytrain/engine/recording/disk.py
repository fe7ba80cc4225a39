"""Write a run's values into plain files that survive a crash, so that no failure stops the run."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from anytrain.core.documents import as_file
from anytrain.core.errors import AnytrainError
from anytrain.core.notices import give_notice

_HALVES = re.compile("[\ud800-\udfff]")
"""Of a name on the disk that is no UTF-8 Python keeps the bytes as these; no file takes them."""


class Disk:
    """Appends and replaces files; the first failure is told, and none is raised."""

    def __init__(self) -> None:
        self._has_complained = False

    def append(self, path: Path, entry: Mapping[str, Any]) -> None:
        """Add an entry as a line of its own."""
        with self.harmless(f"write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            append(path, to_json(entry))

    def replace(self, path: Path, value: Mapping[str, Any]) -> None:
        """Put the value in the file, whole or not at all."""
        with self.harmless(f"write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, to_json(value, indent=2) + "\n")

    @contextmanager
    def harmless(self, what: str) -> Iterator[None]:
        """Run a part of recording: what it cannot do, and why, is told once and raised never."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  full disks, and values that nobody can describe
            if not self._has_complained:
                self._has_complained = True
                give_notice(
                    f"Cannot {what}: {reason(error)}. Training goes on; the record of this run may "
                    "lack entries.",
                    stacklevel=5,
                )


def reason(error: Exception) -> str:
    """Return what an error says; its kind too, where it is none of the disk's."""
    if isinstance(error, AnytrainError):
        return error.why.rstrip(".")
    try:
        return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  an error may fail to say what it is
        return type(error).__name__


def append(path: Path, line: str) -> None:
    """Add a line to the file.

    A line that a crash or a full disk tore off stays alone: the next one starts on its own.
    """
    with as_file(path).open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(f"{line}\n".encode(errors="backslashreplace"))


def replace(path: Path, text: str) -> None:
    """Put the text in the file, whole or not at all."""
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Return valid JSON for any values.

    JSON has no NaN and no infinity: they become the strings that `float()` reads back.

    >>> to_json({"loss": float("nan"), "best": float("inf"), "sizes": [1, 2]})
    '{"loss": "NaN", "best": "Infinity", "sizes": [1, 2]}'
    """
    text = json.dumps(_finite(values), indent=indent, default=_listed, ensure_ascii=False)
    return _HALVES.sub(lambda half: f"\\\\u{ord(half[0]):04x}", text)


def _listed(value: Any) -> Any:
    """Return arrays and tensors as lists, and the rest as its text."""
    return _finite(value.tolist()) if hasattr(value, "tolist") else in_text(value)


def in_text(value: Any) -> str:
    """Return a value's text; of one that fails to say what it is, its type."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001  somebody's own class may do anything here
        return f"<{type(value).__name__}>"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {in_text(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
