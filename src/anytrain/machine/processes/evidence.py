"""Read what the system knows of a process's death: memory, its limits, and kills for want of it.

Only numbers here; `crashes` makes sentences of them, and claims nothing that is not here.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from anytrain.machine.processes import faults, groups
from anytrain.machine.processes.faults import Frame, Seen

SHARED_MEMORY = "/dev/shm"
# Of either version of control groups: where its limit stands, and the most it ever had in use.
_FILES = (
    ("memory.max", "memory.peak"),
    ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class MemoryMarks:
    """What the kernel has counted: kills for want of memory, and the limit they came from."""

    oom_kills: int | None
    source: str
    limit_bytes: int | None
    """The tightest limit of this process's control groups."""
    peak_bytes: int | None = None
    """The most that the group of that limit ever had in use."""
    is_own_group: bool = True
    """Whether the kills are those of this job's own group, and not of the whole machine."""


@dataclass(frozen=True, slots=True)
class Space:
    """The room of shared memory: all of it, and the least that was seen free."""

    total_bytes: int
    free_bytes: int

    @property
    def is_full(self) -> bool:
        """Whether next to nothing was free."""
        return self.free_bytes < max(2**20, self.total_bytes // 100)


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
        seen.peak_bytes = max(seen.peak_bytes, _rss_bytes(usage.ru_maxrss))


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


def shared_memory(folder: str = SHARED_MEMORY) -> Space | None:
    """Return the room of shared memory now; None where there is no such thing."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def memory_marks(root: Path = Path("/")) -> MemoryMarks:
    """Read the kernel's counters as they stand now; compare two readings."""
    folders = groups.folders(root, "memory")
    limit, peak = _tightest(folders)
    for folder in folders:
        for name in ("memory.events", "memory.oom_control"):
            kills = groups.counter(folder / name, "oom_kill")
            if kills is not None:
                return MemoryMarks(kills, "this control group's", limit, peak)
    kills = groups.counter(root / "proc/vmstat", "oom_kill")
    return MemoryMarks(kills, "this machine's", limit, peak, is_own_group=False)


def machine_bytes() -> int:
    """Return how much memory this machine has."""
    return int(psutil.virtual_memory().total)


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


def _rss_bytes(ru_maxrss: int) -> int:
    return ru_maxrss if sys.platform == "darwin" else ru_maxrss * 1024


def _least(one: Space | None, other: Space | None) -> Space | None:
    known = [space for space in (one, other) if space is not None]
    return min(known, key=lambda space: space.free_bytes, default=None)


def _tightest(folders: list[Path]) -> tuple[int | None, int | None]:
    """Return the smallest limit and the most that was ever in use under it."""
    found = []
    for folder in folders:
        for limit_name, peak_name in _FILES:
            limit = groups.number(folder / limit_name)
            # Version 1 writes "no limit" as the largest multiple of a page.
            if limit is not None and limit < 2**60:
                found.append((limit, groups.number(folder / peak_name)))
    return min(found, key=lambda pair: pair[0], default=(None, None))
