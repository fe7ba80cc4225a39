"""Keep an earlier run's checkpoints apart from those of the run that begins in its folder.

They would be counted by save_total_limit, and resume_from_checkpoint=True could go on from one of
them. So they are moved to a folder beside, where neither looks; with overwrite_output_dir they
are removed, and with earlier_total_limit those of older runs.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from anytrain.core.documents import as_file, parse
from anytrain.core.errors import BadInput, CheckpointError
from anytrain.core.notices import give_notice
from anytrain.core.records import RUN
from anytrain.core.text import amount
from anytrain.doors.trainer.outputs import PREFIX_CHECKPOINT_DIR
from anytrain.engine.checkpoint import Store, files, locks
from anytrain.machine.parallel.world import World

_CLOCK_S = 3.0
"""The kernel derives a start time from a boot time that clock corrections may move."""
_ASIDE = "earlier-"
_APART = re.compile(rf"{_ASIDE}(\d+)")
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")


@contextmanager
def alone(root: Path, world: World, *, saves: bool = True) -> Iterator[None]:
    """Keep a folder to this run for as long as the block lasts.

    Refuse to save where another process trains: each would overwrite what the other saves. Of
    several ranks the first claims it for all, and each must see what that one writes there.
    """
    with ExitStack() as stack:
        who = world.broadcast_object(_claimed_by(root, stack) if world.rank == 0 else None)
        if who is not None and saves:
            raise BadInput(
                f"Cannot begin a run in {root}.",
                why=f"{who} trains there at this moment, and each of the two would overwrite "
                "what the other saves.",
                fix="choose another output_dir, or wait until that run has ended (`anytrain watch "
                f"{root}` shows it).",
            )
        if saves and world.size > 1:
            Store(root).refuse_unshared(world)
        yield


def _claimed_by(root: Path, stack: ExitStack) -> str | None:
    """Claim the folder until the stack is left; return who has it, where that is another."""
    with suppress(OSError):  # a save will tell what is wrong with the folder
        files.make_folders(root)
    try:
        stack.enter_context(locks.claimed(root))
    except locks.Taken as taken:
        return taken.who
    pid = _who_trains(root)  # of a version or on a filesystem that has no claims
    return None if pid is None else f"process {pid}"


def _who_trains(root: Path) -> int | None:
    """Return the process of this host whose run in the folder has not ended; None: there is none.

    A number may have gone to another process since, which is younger than the run; in another
    container of the same name it may be anything.
    """
    try:
        starts = parse(as_file(root / RUN).read_bytes()).get("starts")
        last = starts[-1] if isinstance(starts, list) and starts else {}
        if "ended" in last or last.get("host") != socket.gethostname():
            return None
        process = psutil.Process(int(last["pid"]))
        is_old_enough = process.create_time() <= float(last["time"]) + _CLOCK_S
        is_same = is_old_enough and any("python" in word for word in process.cmdline()[:2])
        is_live = process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
    except (OSError, psutil.Error, AttributeError, KeyError, TypeError, ValueError):
        return None
    return process.pid if is_same and is_live else None


def clear_the_way(root: Path, world: World, limit: int | None = None) -> None:
    """Move the checkpoints of an earlier run aside, on rank 0, while the others wait.

    Of what was moved aside so far, the newest `limit` folders keep their checkpoints; None: all.
    """
    said, failure = world.broadcast_object(_cleared(root, limit) if world.rank == 0 else ("", ""))
    if failure:
        raise CheckpointError(
            f"Cannot begin a run in {root}.",
            why=f"an earlier run's checkpoints are there, and cannot be moved: {failure}.",
            fix="choose another output_dir, or pass resume_from_checkpoint=True to go on from it.",
        )
    if said and world.rank == 0:
        give_notice(said, stacklevel=5)


def _cleared(root: Path, limit: int | None) -> tuple[str, str]:
    """Return what to tell of it, and what failed."""
    try:
        found = _checkpoints(root)
        if not found:
            return "", ""
        if limit == 0:
            for path in found:
                locks.remove(root, path.name)
            return "", ""
        numbers = [int(n[1]) for name in os.listdir(root) if (n := _APART.fullmatch(name))]
        aside = root / f"{_ASIDE}{max(numbers, default=0) + 1}"
        files.make_folder(aside)
        for path in found:
            files.rename(path, aside / path.name)
        files.sync_folder(aside)
        files.sync_folder(root)
        kept, num_removed = _capped(root, limit)
    except OSError as error:
        return "", str(error)
    several = f"; {kept[0].name} to {aside.name} take {_size(kept)}" if len(kept) > 1 else ""
    removed = f" Removed {amount(num_removed, 'checkpoint')} of older runs." if num_removed else ""
    return (
        f"{root} held {amount(len(found), 'checkpoint')} of an earlier run: "
        f"moved to {aside} ({_size([aside])}{several}), because this run does not go on from "
        f"them.{removed} Pass "
        "resume_from_checkpoint=True to go on from a run, overwrite_output_dir=True to remove "
        "what it left, earlier_total_limit=N to keep no more than N such folders."
    ), ""


def _capped(root: Path, limit: int | None) -> tuple[list[Path], int]:
    """Remove the checkpoints beyond the limit; return the folders that stay, and how many went.

    Somebody's own files in such a folder stay, and with them the folder.
    """
    numbered = [
        (int(number[1]), path)
        for path in root.iterdir()
        if (number := _APART.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    aside = [path for _, path in sorted(numbered)]
    num_removed = 0
    for folder in aside[:-limit] if limit else ():
        locks.clear_abandoned(folder)
        for path in _checkpoints(folder):
            locks.remove(folder, path.name)
            num_removed += 1
        with suppress(OSError):  # something else lies there
            files.remove_folder(folder)
    return [path for path in aside if path.exists()], num_removed


def _size(folders: Iterable[Path]) -> str:
    """Return how much folders take, as people write it."""
    names = [folder / name for folder in folders for name in files.names_in(folder)]
    size = float(sum(path.lstat().st_size for path in names))
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _checkpoints(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(
        path
        for path in root.iterdir()
        if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )
