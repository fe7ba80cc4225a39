"""Who holds what: hidden names beside a checkpoint, and the folder of a run.

A folder being written, replaced or removed lies beside its final place under a hidden name
that says which process holds it. What a dead process left can then be told from what a live
one is writing. A run's folder is claimed by a lock on a file in it, of which the system lets go
with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import psutil

from anytrain.core import documents
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
_LOCK = ".training"
_TELLS_WITHIN_S = 1.0
_locks: dict[str, int] = {}
"""The folders that this process has claimed, and the open files whose locks hold them."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A hidden folder: the checkpoint it belongs to, what for, and whose it is."""

    path: Path
    name: str
    purpose: Purpose
    place: str
    pid: int
    started: int


class Taken(Exception):
    """Another process has claimed the folder; `pid` is its number, where it is of this host."""

    def __init__(self, who: str, pid: int | None = None) -> None:
        super().__init__(who)
        self.who = who
        self.pid = pid


@contextmanager
def claimed(root: Path) -> Iterator[None]:
    """Claim a folder for this process, in one act, for as long as the block lasts.

    Raises Taken where another process has it. What this process holds already it may claim again.
    A filesystem without locks leaves everybody in.
    """
    key = os.path.realpath(root)
    descriptor = None if key in _locks else _lock(Path(key) / _LOCK)
    if descriptor is None:
        yield
        return
    _locks[key] = descriptor
    try:
        yield
    finally:
        if _locks.pop(key, None) is not None:  # a child that was forked holds nothing
            with suppress(OSError):
                files.unlink(Path(key) / _LOCK)  # while it is locked: nobody else's can be there
            os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Return an open file that this process alone has locked; None where there are no locks."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                _sign(descriptor)
                return descriptor
        except BlockingIOError:
            taken = Taken(*_signature(descriptor))
            os.close(descriptor)
            raise taken from None
        except FileNotFoundError:
            pass  # whoever held it has just let go of it
        except OSError:
            os.close(descriptor)
            return None
        os.close(descriptor)


def _sign(descriptor: int) -> None:
    """Say in the file who has it; a full disk keeps nobody from holding it."""
    with suppress(OSError):
        words = json.dumps({"pid": os.getpid(), "host": platform.node()}).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, words, 0)
        os.fsync(descriptor)


def _signature(descriptor: int) -> tuple[str, int | None]:
    """Return who has locked the file, which may have happened a moment ago, and its number here."""
    deadline = time.monotonic() + _TELLS_WITHIN_S
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError, KeyError, TypeError):
            told = documents.from_json(os.pread(descriptor, 1000, 0))
            pid, host = int(told["pid"]), told["host"]
            if host == platform.node():
                return f"process {pid}", pid
            return f"process {pid} of {ascii(host)}", None
        time.sleep(0.02)
    return "another process", None


def _let_go_in_child() -> None:
    """A worker that outlives its parent must not hold what the parent held."""
    for descriptor in _locks.values():
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


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


def remove(root: Path, name: str) -> None:
    """Remove a checkpoint of this folder so that it is whole or gone, wherever the process dies.

    It takes a name and no path, so that nothing is ever removed outside of the folder.
    """
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a folder in {root}")
    hidden = root / hidden_name(name, "removed")
    files.rename(root / name, hidden)
    files.sync_folder(root)
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
