"""Wait, before Python goes down, until gloo's threads need nothing of it any more.

A gloo thread drops a collective's tensors some time after the collective has been waited for.
If it holds the last reference it needs Python's lock for that, and a thread that asks for the
lock while Python goes down is ended where it stands: the process then dies by SIGABRT
("terminate called without an active exception") with all its work done. Leaving the group does
not help: a model in DDP keeps it, and with it the threads, to the very end.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_THREAD = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_POLL_S = 0.002
_LONGEST_S = 2.0
_UNSEEN_S = 0.05
"""How long to wait where a thread's state cannot be read."""


@cache
def let_gloo_rest_at_exit() -> None:
    """Have this process wait at its end, after whatever is registered later than this."""
    atexit.register(_await_gloo)


def _await_gloo() -> None:
    """Return once gloo's threads sleep; while this sleeps, they can have Python's lock."""
    if not _TASKS.is_dir():
        time.sleep(_UNSEEN_S)
        return
    deadline = time.monotonic() + _LONGEST_S
    looks_asleep = 0
    # Twice: at the first look a thread may be asleep because it waits for the lock.
    while looks_asleep < 2 and time.monotonic() < deadline and (states := list(_states())):
        looks_asleep = looks_asleep + 1 if set(states) == {"S"} else 0
        time.sleep(_POLL_S)


def _states() -> Iterator[str]:
    for task in _TASKS.iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        if name == _THREAD:
            yield rest.split()[0]
