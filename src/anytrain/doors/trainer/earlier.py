"""Keep an earlier run's checkpoints apart from those of the run that begins in its folder.

They would be counted by save_total_limit, and resume_from_checkpoint=True could go on from one of
them. So they are moved to a folder beside, where neither looks; with overwrite_output_dir they
are removed.
"""

from __future__ import annotations

import re
import warnings
from itertools import count
from pathlib import Path

from anytrain.core.errors import CheckpointError, Notice
from anytrain.doors.trainer.outputs import PREFIX_CHECKPOINT_DIR
from anytrain.engine.checkpoint import claims, files
from anytrain.machine.parallel.world import World

_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")


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
