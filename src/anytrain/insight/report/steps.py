"""How many steps a run has taken, and how far its log counts.

A Trainer logs at its updates. A loop of one's own logs at whatever step it says, such as its
batches: there only the timesheet counts updates, and the losses that were taken from `backward`.
"""

from __future__ import annotations

from anytrain.core.documents import whole
from anytrain.core.records import RunRecord, is_unasked

_NEWEST = 100


def logs_at_updates(run: RunRecord) -> bool:
    """Whether a log entry's step is known to be an update of the newest start."""
    return not run.lives or whole(run.lives[-1].began.get("max_steps")) is not None


def position(run: RunRecord) -> int:
    """Return how many updates the run is known to have made."""
    last = run.lives[-1] if run.lives else None
    known = [] if last is None else [whole(last.last.get("step")), whole(last.began.get("step"))]
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
