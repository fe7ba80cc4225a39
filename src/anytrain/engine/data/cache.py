"""Arrays that took a while to make, kept on disk and read as they lie there.

INVARIANT: what is read is what was written for that key, or nothing. A file has its bytes'
checksum in it, and appears under its name whole or not at all. A cache that fails costs time, never
a run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from anytrain.core.notices import give_notice

Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]

_MAGIC = b"anytrain arrays 1\n"
_ALIGN = 64
_MOST_BYTES = 8 << 30
"""What the folder may grow to; the files that were not used for longest go first."""
_ABANDONED_S = 3600
"""A file that nobody has written to for so long was left by a process that was killed."""


class CachedArrays(NamedTuple):
    """Arrays by name, and whether they were on disk already."""

    arrays: Arrays
    was_there: bool


class ArrayCache:
    """A folder of files, one a key; `fresh` makes everything anew and replaces it."""

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self.folder = folder
        self.fresh = fresh

    def get(self, key: str, make: Callable[[], Mapping[str, np.ndarray[Any, Any]]]) -> CachedArrays:
        """Return the arrays of this key, made and kept where they are not there.

        Of several processes that ask at once one makes them, and the others wait for it.
        """
        path = self.folder / f"{key}.arrays"
        if not self.fresh and (found := _read(path)) is not None:
            return CachedArrays(found, True)
        with _turn(path.with_suffix(".lock")):
            if not self.fresh and (found := _read(path)) is not None:
                return CachedArrays(found, True)
            made = dict(make())
            try:
                _write(path, made)
            except OSError as error:
                _tell(error)
            else:
                with suppress(OSError):
                    _prune(self.folder, keep=path)
        return CachedArrays(made, False)


def _tell(error: OSError) -> None:
    give_notice(
        f"What was prepared is not kept for the next run: {error}. "
        "Set ANYTRAIN_CACHE to a folder that can be written to.",
        stacklevel=4,
    )


def _read(path: Path) -> Arrays | None:
    """Return the arrays of a file, mapped into memory; None where it is absent or damaged."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = _parsed(mapped)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    with suppress(OSError):  # somebody else's file, or one that cannot be written
        os.utime(path)  # used now: see _prune
    return found


def _parsed(mapped: mmap.mmap) -> Arrays:
    """Return views of a file's arrays, or raise ValueError where it is not what was written."""
    begin = len(_MAGIC)
    if mapped[:begin] != _MAGIC:
        raise ValueError("not a file of arrays")
    length = int.from_bytes(mapped[begin : begin + 8], "little")
    head = mapped[begin + 8 : begin + 8 + length]
    body = memoryview(mapped)[_aligned(begin + 8 + length) :]
    told = json.loads(head)
    if _digest(told["arrays"], [body]) != told["blake2b"]:
        raise ValueError("its bytes changed")
    return {
        name: np.frombuffer(body, dtype=dtype, count=count, offset=offset)
        for name, dtype, count, offset in told["arrays"]
    }


def _write(path: Path, arrays: Arrays) -> None:
    """Put a file under its name in one step, once all of it is written."""
    listed, offset = [], 0
    parts: list[bytes | memoryview] = []
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        listed.append((name, flat.dtype.str, flat.size, offset))
        padding = bytes(_aligned(offset + flat.nbytes) - offset - flat.nbytes)
        offset += flat.nbytes + len(padding)
        parts += [flat.view(np.uint8).data, padding]
    head = json.dumps({"blake2b": _digest(listed, parts), "arrays": listed}).encode()
    start = len(_MAGIC) + 8 + len(head)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.write(_MAGIC + len(head).to_bytes(8, "little") + head)
            file.write(bytes(_aligned(start) - start))
            for part in parts:
                file.write(part)
        os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _digest(listed: list[Any], parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(json.dumps(listed).encode(), digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold a file's lock, which the system lets go of if the process dies.

    Where nothing can be locked, several may write: each a whole file of the same content.
    """
    with ExitStack() as held:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(path.open("wb")), fcntl.LOCK_EX)
        yield
        with suppress(OSError):
            path.unlink()


def _prune(folder: Path, keep: Path) -> None:
    """Remove the files that were not used for longest while there are too many bytes.

    What was left half written goes too. Other processes do the same at the same time.
    """
    for file, found in _stats(folder.glob("*.part")):
        if time.time() - found.st_mtime > _ABANDONED_S:
            _remove(file)
    files = sorted(_stats(folder.glob("*.arrays")), key=lambda each: each[1].st_mtime)
    total = sum(found.st_size for _, found in files)
    for file, found in files:
        if total <= _MOST_BYTES:
            break
        if file != keep and _remove(file):
            total -= found.st_size


def _stats(files: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield those that are still there, with what the system knows of them."""
    for file in files:
        try:
            found = file.stat()
        except OSError:  # another process has removed it
            continue
        yield file, found


def _remove(file: Path) -> bool:
    """Remove a file; return whether it is gone."""
    try:
        file.unlink(missing_ok=True)
    except OSError:  # somebody else's
        return False
    return True
