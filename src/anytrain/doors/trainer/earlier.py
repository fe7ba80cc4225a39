"""Keep an earlier run's checkpoints apart from those of the run that begins in its folder.

They would be counted by save_total_limit, and resume_from_checkpoint=True could go on from one of
them. So they are moved to a folder beside, where neither looks; with overwrite_output_dir they
are removed.
"""

from __future__ import annotations

import os
import re
import socket
import warnings
from itertools import count
from pathlib import Path

import psutil

from anytrain.core.errors import BadInput, CheckpointError, Notice
from anytrain.core.records import RUN
from anytrain.core.records.lines import parse
from anytrain.doors.trainer.outputs import PREFIX_CHECKPOINT_DIR
from anytrain.engine.checkpoint import claims, files
from anytrain.machine.parallel.world import World

_CLOCK_S = 3.0
"""The kernel derives a start time from a boot time that clock corrections may move."""
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")


def refuse_company(root: Path, world: World) -> None:
    """Refuse to train where another process trains: each would overwrite what the other saves."""
    pid = world.broadcast_object(_who_trains(root) if world.rank == 0 else None)
    if pid is not None:
        raise BadInput(
            f"Cannot begin a run in {root}.",
            why=f"process {pid} trains there at this moment, and each of the two would overwrite "
            "what the other saves.",
            fix="choose another output_dir, or wait until that run has ended (`anytrain watch "
            f"{root}` shows it).",
        )


def _who_trains(root: Path) -> int | None:
    """Return the process of this host whose run in the folder has not ended; None: there is none.

    A number may have gone to another process since, which is younger than the run; in another
    container of the same name it may be anything.
    """
    try:
        starts = parse((root / RUN).read_bytes()).get("starts")
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


def clear_the_way(root: Path, world: World, *, remove: bool) -> None:
    """Move or remove the checkpoints of an earlier run, on rank 0, while the others wait."""
    said, failure = world.broadcast_object(_cleared(root, remove) if world.rank == 0 else ("", ""))
    if failure:
        raise CheckpointError(
            f"Cannot begin a run in {root}.",
            why=f"an earlier run's checkpoints are there, and cannot be moved: {failure}.",
            fix="choose another output_dir, or pass resume_from_checkpoint=True to go on from it.",
        )
    if said and world.rank == 0:
        warnings.warn(said, Notice, stacklevel=5)


def _cleared(root: Path, remove: bool) -> tuple[str, str]:
    """Return what to tell of it, and what failed."""
    try:
        found = _checkpoints(root)
        if not found:
            return "", ""
        if remove:
            for path in found:
                claims.remove(path)
            return "", ""
        aside = next(p for n in count(1) if not (p := root / f"earlier-{n}").exists())
        files.make_folder(aside)
        for path in found:
            files.rename(path, aside / path.name)
        files.sync_folder(aside)
        files.sync_folder(root)
    except OSError as error:
        return "", str(error)
    return (
        f"{root} held {len(found)} checkpoint{'s' if len(found) > 1 else ''} of an earlier run: "
        f"moved to {aside}, for this run does not go on from them. Pass "
        "resume_from_checkpoint=True to go on from a run, overwrite_output_dir=True to remove "
        "what it left."
    ), ""


def _checkpoints(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(
        path
        for path in root.iterdir()
        if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )
