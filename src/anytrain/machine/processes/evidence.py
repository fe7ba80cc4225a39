"""Read what the system knows of a child process: its memory, when it lived, where its stack was.

Only numbers here; `crashes` makes sentences of them, and claims nothing that is not here.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from anytrain.machine.processes import faults
from anytrain.machine.processes.faults import Frame, Seen
from anytrain.machine.processes.host_limits import Space, shared_memory


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a rank left behind, beyond its exit code, its beat and its note."""

    stack: tuple[Frame, ...] = ()
    """The Python stack of a native crash, innermost first."""
    seen: Seen | None = None
    """Where the main thread was when it was last looked at."""
    peak_bytes: int | None = None
    """The most memory that it, or a process that it started, was seen to have in use."""
    peers: tuple[tuple[int, int], ...] = ()
    """The same of every rank of this host that is known, with its rank."""
    address_limit_bytes: int | None = None
    """What `ulimit -v` allowed it; None: anything."""
    shared: Space | None = None


@dataclass(slots=True)
class _Look:
    """What was seen of a process while it ran."""

    peak_bytes: int = 0
    alive_at: float | None = None
    address_limit_bytes: int | None = None
    shared: Space | None = None


_looks: dict[int, _Look] = {}
"""By process number: what this launcher has seen of its children."""


def begin(pid: int) -> None:
    """Forget an earlier process that had the same number."""
    _looks[pid] = _Look()


def look(pid: int) -> None:
    """Take down what the system says of a process that runs; about 0.1 ms."""
    seen = _looks.setdefault(pid, _Look())
    now = _high_water(pid)
    if now:
        seen.alive_at = time.time()
    seen.peak_bytes = max(seen.peak_bytes, now)
    if sys.platform == "linux":
        with suppress(OSError, ValueError):
            soft = resource.prlimit(pid, resource.RLIMIT_AS)[0]
            seen.address_limit_bytes = None if soft == resource.RLIM_INFINITY else soft
    space = shared_memory()
    if space is not None and (seen.shared is None or space.free_bytes < seen.shared.free_bytes):
        seen.shared = space


def alive_at(pid: int) -> float | None:
    """Return when a process was last seen alive, on the wall clock."""
    seen = _looks.get(pid)
    return None if seen is None else seen.alive_at


def forget(pids: Iterable[int]) -> None:
    """Drop what was seen of processes that are done with."""
    for pid in pids:
        _looks.pop(pid, None)


def reaped(pid: int, usage: resource.struct_rusage) -> None:
    """Take down what the kernel says of a process that has ended.

    Its peak is that of the largest of the process and its own children, and counts from before
    the program was loaded, when it was a copy of this process: so it is the child's only where
    it is more than this process ever had.
    """
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if usage.ru_maxrss > own:
        seen = _looks.setdefault(pid, _Look())
        unit = 1 if sys.platform == "darwin" else 1024
        seen.peak_bytes = max(seen.peak_bytes, usage.ru_maxrss * unit)


def collect(folder: str | Path, rank: int, pid: int, code: int) -> Evidence:
    """Return what is known of a rank's end."""
    seen = _looks.get(pid, _Look())
    # A rank that was started again has had several numbers: the latest counts.
    known = {other: number for other, number in faults.processes(folder) if number in _looks}
    peers = {other: _looks[number].peak_bytes for other, number in known.items()}
    peers[rank] = seen.peak_bytes
    return Evidence(
        stack=faults.fault(folder, rank, pid, -code) if code < 0 else (),
        seen=faults.last_seen(folder, rank, pid),
        peak_bytes=seen.peak_bytes or None,
        peers=tuple((other, peak) for other, peak in sorted(peers.items()) if peak),
        address_limit_bytes=seen.address_limit_bytes,
        shared=_least(seen.shared, shared_memory()),
    )


def _high_water(pid: int) -> int:
    """Return the most memory a process has had in use, as its system counts."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0  # it has ended, and waits to be asked
    except (OSError, ValueError):
        with suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
        return 0


def _least(one: Space | None, other: Space | None) -> Space | None:
    known = [space for space in (one, other) if space is not None]
    return min(known, key=lambda space: space.free_bytes, default=None)
