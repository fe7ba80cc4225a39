"""Every touch of the disk that a save makes, and the reads that check it.

A save calls these functions and no others, so that a test can stop a process at each of them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

CHUNK_BYTES = 16 << 20
SMALL_BYTES = 1 << 20
_HASHED_BESIDE_BYTES = 4 << 20
_SYNCING_THREADS = 8
DIGEST_BYTES = 32
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk that takes no more."""
_MISSING = (errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A file's size and the blake2b checksum of its bytes."""

    num_bytes: int
    blake2b: str


class Damaged(Exception):
    """A file is not what the manifest says."""

    def __init__(self, file: str, why: str) -> None:
        super().__init__(file, why)
        self.file, self.why = file, why


# What changes the disk.


def make_folder(path: Path) -> None:
    """Make one folder; its parent must be there."""
    os.mkdir(path)


def create(path: Path) -> int:
    """Open a new file for writing; one that exists already is an error."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: memoryview) -> int:
    """Write some of the bytes and return how many."""
    return os.write(descriptor, data)


def sync(descriptor: int) -> None:
    """Return once the file's bytes are on the disk itself."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone stops at the drive's cache
    if full is not None:
        with suppress(OSError):
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Return once the names in the folder are on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network filesystems order names by themselves and know no fsync of a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Move a name in one step; an empty folder at the target is replaced."""
    os.rename(source, target)


def swap_names(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the filesystem cannot."""
    function, arguments = _swap_call(os.fsencode(one), os.fsencode(other))
    if function is None:
        return False
    if function(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def link(source: Path, target: Path) -> None:
    """Give a file a second name, or a copy where the filesystem has no second names."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def unlink(path: Path) -> None:
    """Remove a file."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    os.rmdir(path)


# What is built on them.


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents, so that they outlive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            make_folder(folder)
        sync_folder(folder.parent)


def write_file(path: Path, chunks: Iterable[Buffer], *, wait: bool = True) -> Fingerprint:
    """Write a new file, wait until it is on the disk, and return its fingerprint.

    With `wait=False` it is on the disk only after `sync_files`.

    A large piece is hashed in a thread while it is written: hashing is the slower of the two.
    """
    digest, total = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    descriptor = create(path)
    try:
        with ExitStack() as stack:
            hasher: ThreadPoolExecutor | None = None
            for piece in _pieces(chunks):
                total += len(piece)
                if hasher is None and len(piece) > _HASHED_BESIDE_BYTES:
                    hasher = stack.enter_context(ThreadPoolExecutor(1))
                hashed = _hash_beside(hasher, digest.update, piece)
                while piece:
                    piece = piece[write(descriptor, piece) :]
                if hashed is not None:
                    hashed.result()
            if wait:
                sync(descriptor)
    finally:
        os.close(descriptor)
    return Fingerprint(total, digest.hexdigest())


def _hash_beside(
    hasher: ThreadPoolExecutor | None, update: Callable[[Buffer], None], piece: memoryview
) -> Future[None] | None:
    """Hash in the thread; here where there is none, or the interpreter is on its way out."""
    with suppress(RuntimeError):
        if hasher is not None:
            return hasher.submit(update, piece)
    update(piece)
    return None


def _pieces(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Cut large chunks and join small ones: an optimizer has a scalar for each parameter."""
    joined = bytearray()
    for chunk in chunks:
        if len(chunk) < SMALL_BYTES:
            joined += chunk
        if joined and (len(joined) >= SMALL_BYTES or len(chunk) >= SMALL_BYTES):
            yield memoryview(joined)
            joined = bytearray()
        if len(chunk) >= SMALL_BYTES:
            view = memoryview(chunk)
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]
    if joined:
        yield memoryview(joined)


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """Return once the files, and their names, are on the disk itself.

    All are waited for at once: a disk that is asked for one after the other takes as many times
    as long.
    """

    def wait_for(name: str) -> None:
        with _opened(folder, name) as descriptor:
            held = os.dup(descriptor)
        try:
            sync(held)  # out here, where a full disk is a full disk and not damage
        finally:
            os.close(held)

    wanted = sorted(names)
    folders = {folder, *(folder / inner for name in wanted for inner in Path(name).parents)}
    waits: list[Callable[[], None]] = [partial(wait_for, name) for name in wanted]
    waits += [partial(sync_folder, held) for held in sorted(folders)]
    with ThreadPoolExecutor(_SYNCING_THREADS) as threads:
        try:
            begun = [threads.submit(wait) for wait in waits]
        except RuntimeError:  # an interpreter that is on its way out starts no thread
            begun = []
    for future in begun:
        future.result()
    for wait in waits if not begun else ():
        wait()


def fingerprint(folder: Path, name: str) -> Fingerprint:
    """Return the fingerprint of a file that somebody else wrote."""
    with _opened(folder, name) as descriptor:
        return _fingerprint(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a folder and all that is in it, following no link; of a link, the link alone."""
    if path.is_symlink():
        unlink(path)
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            unlink(Path(entry.path))
    remove_folder(path)


def link_tree(source: Path, target: Path, names: Iterable[str]) -> None:
    """Give the named files of one folder a second name in another."""
    for name in names:
        parent = (target / name).parent
        if not parent.is_dir():
            make_folders(parent)
        link(source / name, target / name)
        sync_folder(parent)


def free_bytes(path: Path) -> int:
    """Return how much this user may still write to the filesystem."""
    return shutil.disk_usage(path).free


def names_in(folder: Path) -> list[str]:
    """Return every file under the folder, by relative name; links count as files."""
    found = []
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            found += [f"{entry.name}/{name}" for name in names_in(Path(entry.path))]
        else:
            found.append(entry.name)
    return sorted(found)


# What reads and checks.


def read_checked(folder: Path, name: str, expected: Fingerprint) -> bytearray:
    """Return a file's bytes once they match the fingerprint, or raise Damaged.

    The bytes that were checked are the bytes returned: nothing is read twice, so nobody can
    change the file in between.
    """
    with _opened(folder, name) as descriptor:
        _check_size(descriptor, name, expected)
        data = bytearray(expected.num_bytes)
        view, done = memoryview(data), 0
        while done < len(data):
            count = os.readv(descriptor, [view[done : done + CHUNK_BYTES]])
            if count == 0:
                raise Damaged(name, f"it ends after {done:,} of {len(data):,} bytes")
            done += count
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
    _check_digest(name, digest, expected)
    return data


def check_file(folder: Path, name: str, expected: Fingerprint) -> None:
    """Raise Damaged unless the file matches its fingerprint; keeps nothing in memory."""
    with _opened(folder, name) as descriptor:
        _check_size(descriptor, name, expected)
        _check_digest(name, _fingerprint(descriptor).blake2b, expected)


def check_size(folder: Path, name: str, expected: Fingerprint) -> None:
    """Raise Damaged unless the file is there with the right size."""
    with _opened(folder, name) as descriptor:
        _check_size(descriptor, name, expected)


def read_piece(folder: Path, name: str, start: int, num_bytes: int) -> bytes:
    """Return some of a file's bytes, unchecked; fewer where it ends."""
    with _opened(folder, name) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(start)
        return file.read(num_bytes)


def read_small(folder: Path, name: str, most_bytes: int) -> bytes:
    """Return the bytes of a file that has no fingerprint, refusing an endless one."""
    data = read_piece(folder, name, 0, most_bytes + 1)
    if len(data) > most_bytes:
        raise Damaged(name, f"it is larger than {most_bytes:,} bytes")
    return data


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[int]:
    """Open a plain file under the folder, following no link on the way down from it."""
    held = []
    try:
        held.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        *parents, last = name.split("/")
        for parent in parents:
            held.append(_open_at(parent, held[-1], os.O_DIRECTORY))
        # O_NONBLOCK: opening a named pipe would otherwise wait for a writer.
        held.append(_open_at(last, held[-1], os.O_NONBLOCK))
        if not stat.S_ISREG(os.fstat(held[-1]).st_mode):
            raise Damaged(name, "it is not a plain file")
        yield held[-1]
    except OSError as error:
        raise Damaged(name, _explained(folder, name, error)) from error
    finally:
        for descriptor in held:
            os.close(descriptor)


def _open_at(name: str, folder: int, flags: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)


def _explained(folder: Path, name: str, error: OSError) -> str:
    parts = name.split("/")
    steps = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    if any((folder / step).is_symlink() for step in steps):
        return "it is a symbolic link, which may lead anywhere"
    if error.errno in _MISSING:
        return "it is missing"
    return f"it cannot be read: {error.strerror}"


def _check_size(descriptor: int, name: str, expected: Fingerprint) -> None:
    size = os.fstat(descriptor).st_size
    if size != expected.num_bytes:
        raise Damaged(name, f"it has {size:,} bytes and the manifest says {expected.num_bytes:,}")


def _check_digest(name: str, digest: str, expected: Fingerprint) -> None:
    if digest != expected.blake2b:
        raise Damaged(name, "its bytes changed: the checksum is not the manifest's")


def _fingerprint(descriptor: int) -> Fingerprint:
    digest, total = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    chunk = bytearray(min(CHUNK_BYTES, max(os.fstat(descriptor).st_size, 1)))
    view = memoryview(chunk)
    while count := os.readv(descriptor, [view]):
        digest.update(view[:count])
        total += count
    return Fingerprint(total, digest.hexdigest())


def _swap_call(
    one: bytes, other: bytes
) -> tuple[ctypes._NamedFuncPointer | None, tuple[object, ...]]:
    """Return the system's call for it, which Python does not offer, and its arguments."""
    library = ctypes.CDLL(None, use_errno=True)
    swap = 2  # RENAME_EXCHANGE on Linux, RENAME_SWAP on macOS
    if sys.platform == "darwin":
        return getattr(library, "renamex_np", None), (one, other, ctypes.c_uint(swap))
    here = ctypes.c_int(-100)  # AT_FDCWD
    return getattr(library, "renameat2", None), (here, one, here, other, ctypes.c_uint(swap))
