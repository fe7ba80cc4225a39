"""What compiling a block costs and gives, as earlier runs found it, and whether that repays."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anytrain.core import documents, environment

_MOST_REMEMBERED = 100


@dataclass(frozen=True, slots=True)
class Expectation:
    """What compiling a block costs and gives; of one that was compiled before, as it was then."""

    compile_s: float = 45.0
    """Seconds until it is ready, beside the training."""
    gain: float = 0.08
    """The share of a step that it saves."""
    stall_s: float = 3.0
    """Seconds that training waits while it is put in."""


def repays(steps_left: int, step_s: float, expected: Expectation) -> bool:
    """Whether what is left of a run gains more from compiled blocks than it waits for them.

    >>> repays(345, 0.01, Expectation()), repays(20_000, 0.01, Expectation())
    (False, True)
    """
    left_s = steps_left * step_s - expected.compile_s
    return left_s * expected.gain > expected.stall_s


class Memory:
    """What compiling gave in earlier runs, in a file of the user's cache."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = (folder or environment.cache_folder()) / "regions.json"

    def read(self, key: str) -> Expectation:
        """Return what to expect; the default of a block that was never compiled."""
        try:
            return Expectation(**self._entries()[key])
        except (KeyError, TypeError):
            return Expectation()

    def write(self, key: str, found: Expectation) -> None:
        """Remember what it was; a cache that cannot be written is no harm."""
        entries = self._entries()
        entries.pop(key, None)
        kept = dict([*entries.items(), (key, asdict(found))][-_MOST_REMEMBERED:])
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            part.write_text(json.dumps(kept, indent=1))
            part.replace(self._path)

    def _entries(self) -> dict[str, Any]:
        try:
            found = documents.from_json(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
