"""The folder of one launch, where its processes leave word: made, held, and removed.

A launcher that is killed cannot remove its own. It holds a lock in it, which the system takes away
with the process; whoever launches next removes the folders whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "anytrain-"
_LOCK = "launcher.lock"


@contextmanager
def held() -> Iterator[str]:
    """Give a new folder, and leave none behind."""
    _remove_left()
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    try:
        lock = _lock(Path(folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Lock the folder; the lock's file gets its name only once it is held."""
    draft = folder / f"{_LOCK}.draft"
    lock = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # a file system without locks: the folder is then never taken for left
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(folder / _LOCK)
    return lock


def _remove_left() -> None:
    """Remove this user's folders whose launcher is gone for certain."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # another user's, or another launch removes it just now
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.parent.stat().st_uid == os.getuid():
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
