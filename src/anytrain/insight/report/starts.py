"""The starts of a run: in what they differ, and how many steps they have taken.

A start is told by what it trained with: where a checkpoint brought another value than was given,
that value is `used`. A Trainer logs at its updates. A loop of one's own logs at whatever step it
says, such as its batches: there only the timesheet counts updates, and the losses that were taken
from `backward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from anytrain.core.documents import finite, mapping, whole
from anytrain.core.records import RunRecord, is_unasked

_GROUPS = ("arguments", "data", "model", "hardware", "versions", "git", "python")
# Where it went on from, and a folder with the time in its name: no two starts have the same.
_OWN = frozenset(("resume_from_checkpoint", "logging_dir"))
_NEWEST = 100


class Change(NamedTuple):
    """Something in which a start differs from the one before it."""

    start: int
    """Which start it came with, counted from 1."""
    step: float | None
    """The step that this start went on from."""
    name: str
    before: Any
    after: Any


def counted(run: RunRecord) -> list[dict[str, Any]]:
    """Return the starts that the run is made of: the newest, and those it goes on from."""
    fresh = [n for n, start in enumerate(run.starts) if start.get("step") == 0]
    return run.starts[fresh[-1] if fresh else 0 :]


def arguments(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a start trained with."""
    given = mapping(start.get("arguments"))
    return {**given, **mapping(start.get("used"))} if given else {}


def not_used(start: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return what a start was given and did not train with: name, given, used."""
    given = mapping(start.get("arguments"))
    used = mapping(start.get("used"))
    return [(name, given.get(name), value) for name, value in used.items()]


def changes(run: RunRecord) -> list[Change]:
    """Return in what each start differs from the one before it, where both speak of it."""
    found = []
    for number, (before, after) in enumerate(pairwise(counted(run)), 2):
        step = finite(after.get("step"))
        for group in _GROUPS:
            old, new = _told(before, group), _told(after, group)
            if old and new:
                found += [
                    Change(number, step, name, old.get(name), new.get(name))
                    for name in dict.fromkeys((*old, *new))
                    if name not in _OWN and _differ(old.get(name), new.get(name))
                ]
    return found


def _differ(old: Any, new: Any) -> bool:
    """Whether two values differ; of what is not there, a version may say none, 0 or nothing."""
    return bool(old != new and (old or new))


def _told(start: Mapping[str, Any], group: str) -> dict[str, Any]:
    if group == "arguments":
        return flat(arguments(start))
    value = start.get(group)
    told = value if isinstance(value, Mapping) else {} if value is None else {group: value}
    before = f"{group}." if group in ("data", "model", "git") else ""
    return flat(told, before)


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested mappings as one level, their keys joined by a dot.

    >>> flat({"train": {"num_rows": 3}, "eval": None})
    {'train.num_rows': 3, 'eval': None}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


def logs_at_updates(run: RunRecord) -> bool:
    """Whether a log entry's step is known to be an update of the newest start."""
    return not run.lives or whole(run.life.began.get("max_steps")) is not None


def position(run: RunRecord) -> int:
    """Return how many updates the run is known to have made."""
    known = [whole(run.life.last.get("step")), whole(run.life.began.get("step"))]
    # A kill may leave the log ahead of the timesheet.
    known.append(_logged(run) if logs_at_updates(run) else _logged(run, unasked=True))
    return max((step for step in known if step is not None), default=0)


def own_count(run: RunRecord) -> int | None:
    """Return the step that was logged last where it is not the run's position; else None."""
    logged = None if logs_at_updates(run) else _logged(run)
    return None if logged == position(run) else logged


def _logged(run: RunRecord, *, unasked: bool = False) -> int | None:
    newest = [entry for entry in run.metrics[-_NEWEST:] if is_unasked(entry) == unasked]
    steps = (whole(entry.get("step")) for entry in newest)
    return max((step for step in steps if step is not None), default=None)
