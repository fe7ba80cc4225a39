"""One clean history out of an append-only log that several lives of a run have written.

Each life begins with a marker `{"step": N, "event": "begin", "prelude": P}`: it goes on from
step N, so what earlier lives wrote beyond N never happened to it. From step 0 nothing earlier
counts. The last P entries before the marker are its own: figures of the model before training.

A loop of the user's own logs at steps of its own counting, such as batches. The losses that are
taken from its `backward` are at updates, and a life that goes on says for each kind from where:
`{"step": N, "event": "begin", "of": "log"}`, or "backward".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from anytrain.core.records.lines import with_floats

ASIDE = "evaluation"
"""The event of an entry that a later process has added: it belongs to no step."""
BACKWARD = "backward"
"""The event of a loss that was taken from `backward`, and of which markers are of these."""
LOADED = "loaded"
"""The event of an evaluation after the training, of weights that were loaded: those `of` names."""
LOGGED = "log"
"""What markers are of that are of all other entries."""


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


def parts(history: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the history as it is shown, and the evaluations that stand apart from it.

    Where the user logs a loss, that is the curve. Apart is what a step's own evaluation must not
    be replaced by: one of loaded weights, or another of the same step once the training is over.
    """
    apart = _apart(history)
    left = {id(entry) for entry in apart}
    shown = [e for e in history if e.get("event") != ASIDE and id(e) not in left]
    logged = [entry for entry in shown if not is_unasked(entry)]
    return logged if any("loss" in entry for entry in logged) else shown, apart


def _apart(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    end: float | None = None
    known: set[str] = set()
    for place, entry in enumerate(history):
        if entry.get("event") == LOADED:
            found.append(entry)
        elif "train_runtime" in entry:
            end, known = step_of(entry), _evaluated_before(history, place)
        elif end is not None and step_of(entry) == end and (timed := _timed(entry)):
            if timed <= known:
                found.append(entry)
            known |= timed
    return found


def _evaluated_before(history: list[dict[str, Any]], end: int) -> set[str]:
    """Return what was evaluated at the last step of a training, by the names of its times."""
    step, known = step_of(history[end]), set[str]()
    for entry in reversed(history[:end]):
        if step_of(entry) != step:
            break
        known |= _timed(entry)
    return known


def _timed(entry: dict[str, Any]) -> set[str]:
    return {name for name in entry if name.endswith("_runtime")}


def is_unasked(entry: dict[str, Any]) -> bool:
    """Whether it is a loss that was taken from `backward`: its step is an update."""
    return entry.get("event") == BACKWARD


def _begin(history: list[dict[str, Any]], marker: dict[str, Any]) -> bool:
    first, prelude, of = step_of(marker) or 0, marker.get("prelude", 0), marker.get("of")
    concerned = [entry for entry in history if of is None or is_unasked(entry) == (of == BACKWARD)]
    num_own = min(prelude, len(concerned)) if isinstance(prelude, int) and prelude > 0 else 0
    earlier, own = concerned[: len(concerned) - num_own], concerned[len(concerned) - num_own :]
    kept = _up_to(earlier, first) if first > 0 else []
    left = {id(entry) for entry in concerned} - {id(entry) for entry in [*kept, *own]}
    taken = {id(entry): _taken(entry, first) for entry in own}
    history[:] = [taken.get(id(entry), entry) for entry in history if id(entry) not in left]
    return bool(left)


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
