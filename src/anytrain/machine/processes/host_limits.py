"""What this host and Linux's control groups leave a process: memory, shared memory, cores."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from anytrain.core.errors import DiskFull, NothingFits
from anytrain.core.notices import give_notice

LEAST_BYTES = 140 * 2**20
"""What a fresh process holds for itself once it has imported torch: 144 MiB were measured."""
BASE_BYTES = 300 * 2**20
"""The same with transformers and anytrain: 290 MiB were measured."""
_MARGIN_BYTES = 256 * 2**20
SHARED_MEMORY = "/dev/shm"
_GIB = 2**30
# Where a group's limit stands, what it has in use, which counter of memory.stat is cache, and the
# most it ever had in use; version 2 of groups, then 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file", "memory.peak"),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "memory.max_usage_in_bytes",
    ),
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


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return this process's groups of a controller, its own first, up to the top of the tree.

    Version 2 has one tree for all controllers, version 1 one for each. `root` stands in for /
    in tests.
    """
    mount = root / "sys/fs/cgroup"
    found: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [top.joinpath(*parts[:n]) for n in range(len(parts), 0, -1)]
    # In a container the group's own files stand at the mount, whatever path /proc names.
    return [*found, mount, mount / controller]


def cgroup_values(root: Path, controller: str, *names: str) -> list[str]:
    """Return what a setting says for these groups; its name differs between the versions."""
    texts = (
        cgroup_text(folder / name) for folder in cgroup_folders(root, controller) for name in names
    )
    return [found.strip() for found in texts if found is not None]


def cgroup_text(path: Path) -> str | None:
    """Return what a file of a group says; None where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return None


def cgroup_number(path: Path) -> int | None:
    """Return the number in a file of a group; None where it says "max" or is not there."""
    try:
        return int(cgroup_text(path) or "")
    except ValueError:
        return None


def cgroup_counter(path: Path, name: str) -> int | None:
    """Return a counter out of a file of a group that has one in each line."""
    for line in (cgroup_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return None


@dataclass(frozen=True, slots=True)
class Room:
    """How much memory is free, and what says so."""

    free_bytes: int
    because: str


@dataclass(frozen=True, slots=True)
class Need:
    """What a launch will hold: processes, and tensors that are handed over."""

    num_processes: int
    tensor_bytes: int
    copies: int
    """How many processes will write to the tensors, and so hold them for themselves."""

    @property
    def least_bytes(self) -> int:
        """What it takes to start: the processes, and the tensors once."""
        return self.num_processes * LEAST_BYTES + self.tensor_bytes

    @property
    def bytes(self) -> int:
        """What training will take: the copies too."""
        return self.num_processes * BASE_BYTES + (1 + self.copies) * self.tensor_bytes


def free_memory(root: Path = Path("/")) -> Room:
    """Return the least of what the host and this process's control groups leave free."""
    found = [Room(int(psutil.virtual_memory().available), "the host has")]
    for folder in cgroup_folders(root, "memory"):
        for limit_name, used_name, cache, _ in _CGROUP_FILES:
            limit, used = cgroup_number(folder / limit_name), cgroup_number(folder / used_name)
            if limit is not None and used is not None and limit < 2**60:
                # Cached files that nobody maps are given up before anything is killed.
                kept = max(0, used - (cgroup_counter(folder / "memory.stat", cache) or 0))
                words = f"the control group's limit of {limit / _GIB:.1f} GiB leaves"
                found.append(Room(max(0, limit - kept), words))
    return min(found, key=lambda room: room.free_bytes)


def check_memory(need: Need, room: Room) -> None:
    """Refuse a launch that cannot even start; say so when training will be tight."""
    tensors = f"the tensors handed over {need.tensor_bytes / _GIB:.1f} GiB"
    left = f"{room.because} {room.free_bytes / _GIB:.1f} GiB free"
    if need.least_bytes > room.free_bytes:
        raise NothingFits(
            f"Cannot start {need.num_processes} processes in this host's memory.",
            why=f"with torch they hold {LEAST_BYTES / _GIB:.2f} GiB each, and {tensors}: "
            f"{need.least_bytes / _GIB:.1f} GiB; {left}.",
            fix="start fewer processes, or free memory: delete what the notebook holds and "
            "does not need.",
        )
    if need.bytes > room.free_bytes:
        again = f", and {need.copies} times more as each trains its own copy" if need.copies else ""
        give_notice(
            f"Host memory may run out: {need.num_processes} processes hold about "
            f"{BASE_BYTES / _GIB:.1f} GiB each and {tensors} once{again}: "
            f"{need.bytes / _GIB:.1f} GiB in all; {left}. Fewer processes need less.",
            stacklevel=7,
        )


def shared_memory() -> Space | None:
    """Return the room of shared memory now; None where there is no such thing."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def memory_marks(root: Path = Path("/")) -> MemoryMarks:
    """Read the kernel's counters as they stand now; compare two readings."""
    folders = cgroup_folders(root, "memory")
    limit, peak = _tightest(folders)
    for folder in folders:
        for name in ("memory.events", "memory.oom_control"):
            kills = cgroup_counter(folder / name, "oom_kill")
            if kills is not None:
                return MemoryMarks(kills, "this control group's", limit, peak)
    kills = cgroup_counter(root / "proc/vmstat", "oom_kill")
    return MemoryMarks(kills, "this machine's", limit, peak, is_own_group=False)


def machine_bytes() -> int:
    """Return how much memory this machine has."""
    return int(psutil.virtual_memory().total)


def folder_for_tensors(num_bytes: int, room: Room) -> str:
    """Return where the tensors go: shared memory if it has room for them, else the disk."""
    wanted = num_bytes + _MARGIN_BYTES
    if (
        os.access(SHARED_MEMORY, os.W_OK)
        and min(_free_space(SHARED_MEMORY), room.free_bytes) > wanted
    ):
        return SHARED_MEMORY
    disk = tempfile.gettempdir()
    if _free_space(disk) < num_bytes:
        raise DiskFull(
            f"Cannot hand over {num_bytes / _GIB:.1f} GiB of tensors.",
            why=f"{SHARED_MEMORY} has no room for them, and {disk} has "
            f"{_free_space(disk) / _GIB:.1f} GiB free.",
            fix="make room there, or set TMPDIR to a folder on a larger disk.",
        )
    return disk


def _free_space(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _tightest(folders: list[Path]) -> tuple[int | None, int | None]:
    """Return the smallest limit and the most that was ever in use under it."""
    found = []
    for folder in folders:
        for limit_name, _, _, peak_name in _CGROUP_FILES:
            limit = cgroup_number(folder / limit_name)
            # Version 1 writes "no limit" as the largest multiple of a page.
            if limit is not None and limit < 2**60:
                found.append((limit, cgroup_number(folder / peak_name)))
    return min(found, key=lambda pair: pair[0], default=(None, None))
