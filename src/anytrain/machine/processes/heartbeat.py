"""Keep each rank's last sign of life: at which step it is, and what it is doing.

Marking must cost next to nothing, because every step does it: one write into memory that a
launcher of ours can still read after the process was killed.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# pid, step, moves, wall clock, waiting, what it is doing
_LAYOUT = struct.Struct("<qqqd?160s")


@dataclass(frozen=True, slots=True)
class Beat:
    """Where a rank was when it was last heard of."""

    rank: int
    pid: int
    host: str
    step: int
    doing: str
    waiting: bool
    """Whether it stands in a barrier or another collective call, waiting for its peers."""
    moves: int
    since: float
    """Wall-clock time of its last move."""
    line: str = ""
    """The script's line that its main thread was in, where a watcher looked."""
    stack: str = ""
    """The main thread's calls then, in a few lines."""

    def where(self) -> str:
        """Say where the rank was, in words.

        >>> Beat(1, 7, "here", 12, "backward", False, 3, 0.0).where()
        'at step 12 (backward)'
        """
        step = f"at step {self.step}" if self.step else "before the first step"
        step += f" ({self.doing})" if self.doing else ""
        return f"{step}, in {self.line}" if self.line else step


class Pulse:
    """This rank's own sign of life, in memory and, where a launcher listens, in a file."""

    def __init__(self, rank: int, beats: str | None = None) -> None:
        self.rank = rank
        self.beats = beats
        self._host = socket.gethostname()
        self._pid = os.getpid()
        self._step, self._doing, self._waiting, self._moves = 0, "", False, 0
        self._since = time.time()
        self._file = None if beats is None else _open(beats, rank)
        self._write()

    def mark(self, step: int, doing: str) -> None:
        """Leave word of the step and of what happens in it."""
        self._step, self._doing, self._waiting = step, doing, False
        self._moves += 1
        self._write()

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Tell the others that this rank waits for them inside the block."""
        before = self._doing
        self._doing, self._waiting = doing, True
        self._moves += 1
        self._write()
        try:
            yield
        finally:
            # After an error the place must stay readable: it says where the rank was.
            self._waiting = False
        self._doing = before
        self._moves += 1
        self._write()

    def beat(self) -> Beat:
        """Return the last mark."""
        return Beat(
            self.rank,
            self._pid,
            self._host,
            self._step,
            self._doing,
            self._waiting,
            self._moves,
            self._since,
        )

    def _write(self) -> None:
        self._since = now = time.time()
        if self._file is not None:
            doing = self._doing.encode()
            _LAYOUT.pack_into(
                self._file, 0, self._pid, self._step, self._moves, now, self._waiting, doing
            )


def read_beat(beats: str | Path, rank: int) -> Beat | None:
    """Return what a rank of this host last left in the folder; None where it left nothing."""
    try:
        raw = _path(beats, rank).read_bytes()
        pid, step, moves, since, waiting, doing = _LAYOUT.unpack_from(raw)
    except (OSError, struct.error):
        return None
    words = doing.rstrip(b"\0").decode(errors="ignore")
    return Beat(rank, pid, socket.gethostname(), step, words, waiting, moves, since)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, a few of them where there are many.

    >>> name_ranks([3]), name_ranks(range(9))
    ('rank 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _open(beats: str, rank: int) -> mmap.mmap | None:
    """Map the rank's file; a folder that is gone only means that nobody listens any more."""
    try:
        handle = os.open(_path(beats, rank), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    try:
        os.ftruncate(handle, _LAYOUT.size)
        return mmap.mmap(handle, _LAYOUT.size)
    finally:
        os.close(handle)


def _path(beats: str | Path, rank: int) -> Path:
    return Path(beats) / f"rank-{rank}.beat"
