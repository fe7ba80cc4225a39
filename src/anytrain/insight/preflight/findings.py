"""What a check finds: what is wrong, why, the line, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from anytrain.insight.preflight.trace import SourcePlace

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The gravest first: an error ends the run or spoils it, a warning costs time or memory."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that will fail, or cost something, on a target."""

    kind: str
    """The question that found it, by the name of its file: "kernels", "host_reads", ..."""
    severity: Severity
    what: str
    """One sentence, such as "linalg_eigh has no kernel on mps."."""
    why: str
    fix: str
    place: SourcePlace | None = None
    per_step: int = 0
    """How often a training step meets it; 0 where it is no matter of steps."""
    certain: bool = True
    """Whether it is known ("no kernel"), and not only likely ("may fail")."""
