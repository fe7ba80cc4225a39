"""A pipe by which a child learns that its parent is gone, however it went.

The parent holds one end and writes nothing. When it ends, by SIGKILL too, the system closes
that end, and each child ends itself, with everything it has started.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FLUSH_S = 0.2
_held: set[int] = set()
"""The parent's ends of this process: a fork that kept one would keep other forks alive."""


@contextmanager
def held() -> Iterator[tuple[int, int]]:
    """Give the child's end and the parent's end, for as long as the children live."""
    ends = os.pipe()
    _held.add(ends[1])
    try:
        yield ends
    finally:
        _held.discard(ends[1])
        for end in ends:
            os.close(end)


def let_go() -> None:
    """Close the parent's ends, of every launch that is under way, in a fork of the parent."""
    for end in _held:
        with suppress(OSError):
            os.close(end)
    _held.clear()


def follow(end: int, folder: str) -> None:
    """Watch the parent from a thread; when it is gone, clear the folder and end the group."""
    threading.Thread(target=_follow, args=(end, folder), name="anytrain-leash", daemon=True).start()


def _follow(end: int, folder: str) -> None:
    while not select.select([end], [], [], _FLUSH_S)[0]:
        # What was printed without an end of line must not wait for one.
        _flush()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError, RuntimeError):
            continue  # closed, replaced, or being written to by a signal's handler
