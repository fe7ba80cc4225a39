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
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TICK_S = 0.2
_ASKED, _STACK = "asked-for-stacks", "rank-{}.stack"


@contextmanager
def held() -> Iterator[tuple[int, int]]:
    """Give the child's end and the parent's end, for as long as the children live."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def follow(end: int, folder: str, rank: int) -> None:
    """Watch the parent from a thread; when it is gone, clear the folder and end the group."""
    threading.Thread(
        target=_follow, args=(end, folder, rank), name="anytrain-leash", daemon=True
    ).start()


def ask_for_stacks(folder: str) -> None:
    """Ask every child to write down where its main thread is."""
    (Path(folder) / _ASKED).touch()


def stack(folder: str, rank: int) -> str | None:
    """Return where the rank's main thread was when it was asked; None if it gave no answer."""
    try:
        return (Path(folder) / _STACK.format(rank)).read_text()
    except OSError:
        return None


def _follow(end: int, folder: str, rank: int) -> None:
    asked = Path(folder) / _ASKED
    answered = False
    while not select.select([end], [], [], TICK_S)[0]:
        # What was printed without an end of line must not wait for one.
        _flush()
        if not answered and asked.exists():
            answered = True
            _write_stack(folder, rank)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _write_stack(folder: str, rank: int) -> None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is not None:
        path = Path(folder) / _STACK.format(rank)
        draft = path.with_suffix(".draft")
        draft.write_text("".join(traceback.format_stack(frame)))
        draft.replace(path)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError, RuntimeError):
            continue  # closed, replaced, or being written to by a signal's handler
