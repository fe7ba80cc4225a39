"""How a save ended: a value, because training goes on either way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anytrain.core.errors import CheckpointError

FailureKind = Literal["space", "disk", "nonfinite", "occupied", "not-shared", "peer"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is committed; whatever happens now, it is whole."""

    path: Path
    step: int
    num_bytes: int
    seconds: float
    removed: tuple[Path, ...] = ()
    """What retention removed after the commit."""
    notes: tuple[str, ...] = ()
    """What went wrong after the commit, such as an old checkpoint that can't be removed."""


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """No checkpoint was committed; the earlier ones are as they were."""

    path: Path
    kind: FailureKind
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.fix}"

    def error(self) -> CheckpointError:
        """Return the failure as an error, for a caller that must stop on it."""
        return CheckpointError(self.what, why=self.why, fix=self.fix)
