"""Is there room for the checkpoints?"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Trace
from anytrain.insight.preflight.units import size

# A new checkpoint is whole before an old one goes: two are there at once.
_AT_ONCE = 2


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield a disk that has no room for one checkpoint, or for a second beside it."""
    needed, folder = trace.job.checkpoint_bytes, trace.job.output_dir
    if not needed or not folder:
        return
    free = shutil.disk_usage(_existing(Path(folder))).free
    if free >= _AT_ONCE * needed:
        return
    fits_one = free >= needed
    yield Finding(
        "disk",
        "warning" if fits_one else "error",
        f"A checkpoint takes {size(needed)} and {folder} has {size(free)} left, on this machine.",
        why="The next checkpoint is written whole before the last one is removed."
        if fits_one
        else "Weights and optimizer state are saved; the first save would fail.",
        fix="Make room, pass another output_dir, or save the model alone (save_only_model=True).",
        place=trace.job.output_place,
        certain=target.is_local,
    )


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
