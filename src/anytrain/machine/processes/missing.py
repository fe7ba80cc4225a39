"""Say of a rank that has not come to the meeting what this machine knows of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from anytrain.core import environment
from anytrain.core.environment import RankPlace
from anytrain.machine.processes import faults

ENDED, STOPPED = "has ended", "is stopped (SIGSTOP, or Ctrl-Z)"
_COMING = "has started, and is on its way"
_UNSEEN = "cannot be seen from here: it was not started, has ended, or is on another machine"


@dataclass(slots=True)
class Missing:
    """What one rank sees of those that its launcher started beside it."""

    place: RankPlace
    beats: str | None
    _seen: dict[int, list[int]] = field(default_factory=dict)
    """By rank: the numbers of its processes, wrappers among them, once they were seen."""

    def look(self) -> None:
        """Take down who is there: one that was seen and is gone has ended."""
        if self.beats is not None:
            self._seen.update({rank: [pid] for rank, pid in faults.processes(self.beats)})
        # These last: a rank that was started again has an earlier process in the folder.
        self._seen.update(_of_this_job())

    def state(self, rank: int, left: str = "") -> str:
        """Return in words what is known of the rank's process.

        `left` is the number and the host that it has left, if it has come at all.
        """
        pid, _, host = left.partition(" ")
        if left:
            return _words([int(pid)]) if host == socket.gethostname() else _UNSEEN
        if rank in self._seen:
            return _words(self._seen[rank])
        return ENDED if self._is_gone(rank) else _UNSEEN

    def pid(self, rank: int) -> str:
        """Return the number of the rank's process in parentheses; "" where it was not seen."""
        return f" (pid {self._seen[rank][-1]})" if rank in self._seen else ""

    def is_lowest_here(self) -> bool:
        """Whether this is the lowest of the ranks that are seen beside it, which speaks for all."""
        alive = [rank for rank, pids in self._seen.items() if _words(pids) == _COMING]
        return self.place.rank <= min(alive, default=self.place.rank)

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank that was never seen has ended: a launcher starts all of them at once."""
        size = max(1, self.place.local_size)
        is_launched = self.beats is not None or environment.variable("TORCHELASTIC_RUN_ID")
        if not is_launched or rank // size != self.place.rank // size:
            return False
        return len([each for each in _siblings() if _words([each.pid]) != ENDED]) < size


def _of_this_job() -> dict[int, list[int]]:
    """Return the processes of this machine that are to meet here too, by rank."""
    found: dict[int, list[int]] = {}
    port = environment.variable("MASTER_PORT")
    for each in psutil.process_iter() if port else ():
        with suppress(psutil.Error, OSError):
            env = each.environ()
            if env.get("MASTER_PORT") == port and env.get("RANK", "").isdecimal():
                found.setdefault(int(env["RANK"]), []).append(each.pid)
    return found


def _words(pids: Sequence[int]) -> str:
    """Return in words how the processes of a rank are."""
    states = set(map(_state, pids))
    return next((words for words in (STOPPED, _COMING) if words in states), ENDED)


def _state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ENDED
    except psutil.Error:
        return _COMING
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return ENDED
    return STOPPED if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else _COMING


def _siblings() -> list[psutil.Process]:
    try:
        return psutil.Process(os.getppid()).children()
    except psutil.Error:
        return []
