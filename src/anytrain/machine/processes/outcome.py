"""What a child brings back: a value, or an error with the lines it came through."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytrain.machine.processes import handover
from anytrain.machine.processes.exceptions import Told


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank's call went."""

    error: list[Told] | None
    value: Any


def write(folder: str, rank: int, parcel: handover.Parcel) -> None:
    """Write down how it went, whole or not at all; a full disk is an OSError."""
    path = _path(folder, rank)
    draft = path.with_suffix(".draft")
    try:
        with draft.open("wb") as file:
            parcel.write(file)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read(folder: str, rank: int) -> Outcome | None:
    """Return what the rank wrote; tensors in it are on the CPU."""
    path = _path(folder, rank)
    if not path.exists():
        return None
    with path.open("rb") as file:
        found: Outcome = handover.receive(file.fileno())
    return found


def _path(folder: str, rank: int) -> Path:
    return Path(folder) / f"outcome-{rank}.pkl"
