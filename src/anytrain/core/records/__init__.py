"""The record that a run keeps of itself in its folder: what is in it, and how it is read back.

`open_run(folder)` gives all of it; `read(folder)` the lives alone; `open_sweep(folder)` the trials
of a search. Every file may be missing, cut off in its last line by a kill, or of an older version:
reading tells what is there.
"""

from anytrain.core.records.history import BACKWARD, LOADED, LOGGED, is_unasked
from anytrain.core.records.life import TIMESHEET, Life, counted, read, together
from anytrain.core.records.run import (
    EVALUATION,
    EVENTS,
    FORMAT,
    METRICS,
    RUN,
    RunRecord,
    evaluation_name,
    is_run,
    open_run,
)
from anytrain.core.records.sweep import SWEEP, Sweep, Trial, open_sweep

__all__ = [
    "BACKWARD",
    "EVALUATION",
    "EVENTS",
    "FORMAT",
    "LOADED",
    "LOGGED",
    "METRICS",
    "RUN",
    "SWEEP",
    "TIMESHEET",
    "Life",
    "RunRecord",
    "Sweep",
    "Trial",
    "counted",
    "evaluation_name",
    "is_run",
    "is_unasked",
    "open_run",
    "open_sweep",
    "read",
    "together",
]
