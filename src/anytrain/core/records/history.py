"""One clean history out of an append-only log that several lives of a run have written.

Each life begins with a marker `{"step": N, "event": "begin", "prelude": P}`: it goes on from
step N, so what earlier lives wrote beyond N never happened to it. From step 0 nothing earlier
counts. The last P entries before the marker are its own: figures of the model before training.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from anytrain.core.records.lines import with_floats

ASIDE = "evaluation"
"""The event of an entry that a later process has added: it belongs to no step."""


def add_entries(history: list[dict[str, Any]], entries: Iterable[dict[str, Any]]) -> bool:
    """Add a log's next lines to the history so far; return whether some of it was dropped."""
    has_dropped = False
    for entry in entries:
        if entry.get("event") == "begin":
            has_dropped |= _begin(history, entry)
        else:
            history.append(with_floats(entry))
    return has_dropped


def step_of(entry: dict[str, Any]) -> float | None:
    """Return the step that an entry was written at; None where it does not say."""
    step = entry.get("step")
    return step if isinstance(step, int | float) and not isinstance(step, bool) else None


def _begin(history: list[dict[str, Any]], marker: dict[str, Any]) -> bool:
    first, prelude = step_of(marker) or 0, marker.get("prelude", 0)
    num_own = min(prelude, len(history)) if isinstance(prelude, int) and prelude > 0 else 0
    own = [_taken(entry, first) for entry in history[len(history) - num_own :]]
    kept = _up_to(history[: len(history) - num_own], first) if first > 0 else []
    has_dropped = len(kept) + len(own) < len(history)
    history[:] = [*kept, *own]
    return has_dropped


def _taken(entry: dict[str, Any], step: float) -> dict[str, Any]:
    """Return an entry that stood aside as one of the history."""
    if entry.get("event") != ASIDE:
        return entry
    return {**{name: value for name, value in entry.items() if name != "event"}, "step": step}


def _up_to(earlier: list[dict[str, Any]], last: float) -> list[dict[str, Any]]:
    """Return the entries up to a step; one without a step is at the step of the one before it."""
    kept, at = [], 0.0
    for entry in earlier:
        step = step_of(entry)
        at = at if step is None else step
        if at <= last:
            kept.append(entry)
    return kept
