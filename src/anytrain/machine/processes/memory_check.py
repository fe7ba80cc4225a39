"""Compare the host's free memory with what a launch will need, before it is too late."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from anytrain.core.errors import DiskFull, NothingFits
from anytrain.core.notices import give_notice
from anytrain.machine.processes import groups

LEAST_BYTES = 140 * 2**20
"""What a fresh process holds for itself once it has imported torch: 144 MiB were measured."""
BASE_BYTES = 300 * 2**20
"""The same with transformers and anytrain: 290 MiB were measured."""
_MARGIN_BYTES = 256 * 2**20
_SHARED = "/dev/shm"
_GIB = 2**30
# Each pair: where a group's limit stands, how much it has in use; version 2 of groups, then 1.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


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


def free(root: Path = Path("/")) -> Room:
    """Return the least of what the host and this process's control groups leave free."""
    found = [Room(int(psutil.virtual_memory().available), "the host has")]
    for folder in groups.folders(root, "memory"):
        for limit_name, used_name, cache in _FILES:
            limit, used = groups.number(folder / limit_name), groups.number(folder / used_name)
            if limit is not None and used is not None and limit < 2**60:
                # Cached files that nobody maps are given up before anything is killed.
                kept = max(0, used - (groups.counter(folder / "memory.stat", cache) or 0))
                words = f"the control group's limit of {limit / _GIB:.1f} GiB leaves"
                found.append(Room(max(0, limit - kept), words))
    return min(found, key=lambda room: room.free_bytes)


def check(need: Need, room: Room) -> None:
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


def folder_for(num_bytes: int, room: Room) -> str:
    """Return where the tensors go: shared memory if it has room for them, else the disk."""
    wanted = num_bytes + _MARGIN_BYTES
    if os.access(_SHARED, os.W_OK) and min(_space(_SHARED), room.free_bytes) > wanted:
        return _SHARED
    disk = tempfile.gettempdir()
    if _space(disk) < num_bytes:
        raise DiskFull(
            f"Cannot hand over {num_bytes / _GIB:.1f} GiB of tensors.",
            why=f"{_SHARED} has no room for them, and {disk} has "
            f"{_space(disk) / _GIB:.1f} GiB free.",
            fix="make room there, or set TMPDIR to a folder on a larger disk.",
        )
    return disk


def _space(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
