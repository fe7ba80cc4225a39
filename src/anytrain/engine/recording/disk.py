"""Write a run's record so that nothing about it can stop the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anytrain.core.errors import AnytrainError
from anytrain.core.notices import give_notice
from anytrain.engine.recording.trackers.files import append, replace, to_json


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
