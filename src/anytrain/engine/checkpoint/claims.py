"""Hidden names beside a checkpoint, and who holds them.

A folder being written, replaced or removed lies beside its final place under a hidden name
that says which process holds it. What a dead process left can then be told from what a live
one is writing.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import psutil

from anytrain.engine.checkpoint import files

Purpose = Literal["saving", "replaced", "removed"]

ABANDONED_S = 3600.0
"""A folder held by another machine is abandoned when nothing in it changed for so long."""

_PATTERN = re.compile(
    r"\.(?P<name>.+)\.(?P<purpose>saving|replaced|removed)"
    r"-(?P<place>[0-9a-f]{12})-(?P<pid>\d+)-(?P<started>\d+)-(?P<serial>\d+)"
)
_serials = itertools.count()
_held_here: set[str] = set()


@dataclass(frozen=True, slots=True)
class Claim:
    """A hidden folder: the checkpoint it belongs to, what for, and whose it is."""

    path: Path
    name: str
    purpose: Purpose
    place: str
    pid: int
    started: int


def hidden_name(name: str, purpose: Purpose) -> str:
    """Return a new hidden name for a checkpoint's folder, held by this process."""
    owner = f"{_place()}-{os.getpid()}-{_started(os.getpid())}-{next(_serials)}"
    return f".{name}.{purpose}-{owner}"


def hold(path: Path) -> None:
    """Keep this process's own clean-up away from the folder until `let_go`."""
    _held_here.add(path.name)


def let_go(path: Path) -> None:
    """Undo `hold`."""
    _held_here.discard(path.name)


def claims_in(root: Path) -> list[Claim]:
    """Return the hidden folders beside the checkpoints of a root."""
    found = []
    for entry in os.scandir(root):
        match = _PATTERN.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            text = match.groupdict()
            purpose: Purpose = text["purpose"]  # type: ignore[assignment]  # the pattern's words
            numbers = int(text["pid"]), int(text["started"])
            found.append(Claim(Path(entry.path), text["name"], purpose, text["place"], *numbers))
    return found


def clear_abandoned(root: Path) -> list[Path]:
    """Remove what dead processes left in the root, and return what was removed.

    A replaced checkpoint whose successor never took its place is put back instead.
    """
    cleared = []
    for claim in claims_in(root):
        if _is_live(claim):
            continue
        with suppress(OSError):  # somebody else clears it too, or it cannot be removed yet
            if claim.purpose == "replaced" and not (root / claim.name).exists():
                files.rename(claim.path, root / claim.name)
                files.sync_folder(root)
                continue
            files.remove_tree(claim.path)
            cleared.append(claim.path)
    return cleared


def remove(path: Path) -> None:
    """Remove a checkpoint so that it is whole or gone, wherever the process dies."""
    hidden = path.with_name(hidden_name(path.name, "removed"))
    files.rename(path, hidden)
    files.sync_folder(path.parent)
    files.remove_tree(hidden)


def _is_live(claim: Claim) -> bool:
    if claim.place != _place():
        return time.time() - _last_change(claim.path) < ABANDONED_S
    if claim.pid == os.getpid() and claim.started == _started(claim.pid):
        return claim.path.name in _held_here
    # The kernel derives the start time from a boot time that clock corrections may move.
    started = _started(claim.pid)
    return started is not None and abs(started - claim.started) <= 3


def _last_change(folder: Path) -> float:
    times = [0.0]
    with suppress(OSError):
        times.append(folder.stat().st_mtime)
        times += [(folder / name).lstat().st_mtime for name in files.names_in(folder)]
    return max(times)


def _started(pid: int) -> int | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:  # dead, and its parent has not looked yet
            return None
        return int(process.create_time())
    except psutil.Error:
        return None


@cache
def _place() -> str:
    """Return a word for this machine since its last boot, and for its view of processes."""
    facts = [platform.node()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            facts.append(os.readlink(source) if "/ns/" in source else Path(source).read_text())
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()
