"""The record that a run keeps of itself in its folder: what is in it, and how it is read back.

`open_run(folder)` gives all of it; `read(folder)` the lives alone. Every file may be missing, cut
off in its last line by a kill, or of an older version: reading tells what is there.
"""

from anytrain.core.records.life import TIMESHEET, Life, read
from anytrain.core.records.run import (
    EVALUATION,
    EVENTS,
    FORMAT,
    METRICS,
    RUN,
    Run,
    evaluation_name,
    open_run,
)

__all__ = [
    "EVALUATION",
    "EVENTS",
    "FORMAT",
    "METRICS",
    "RUN",
    "TIMESHEET",
    "Life",
    "Run",
    "evaluation_name",
    "open_run",
    "read",
]
