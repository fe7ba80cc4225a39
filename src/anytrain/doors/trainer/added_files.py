"""Files that a subclass or a callback puts into a checkpoint's folder before it is saved.

HF writes its checkpoint around them. Here a checkpoint appears whole, by one rename, so they are
set aside and written with the rest.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from anytrain.engine.checkpoint import huggingface
from anytrain.engine.checkpoint.manifest import MANIFEST


def set_aside(target: Path) -> Path | None:
    """Move what lies where a checkpoint will be out of its way; None where nothing does.

    A checkpoint, of anytrain or of another library, is no such thing.
    """
    if target.is_symlink() or not target.is_dir() or not any(target.iterdir()):
        return None
    if (target / MANIFEST).exists() or huggingface.is_hf_folder(target):
        return None
    aside = target.with_name(f".{target.name}.given")
    if aside.exists():
        shutil.rmtree(aside)
    return target.rename(aside)


def add(aside: Path | None, folder: Path) -> None:
    """Copy what was set aside into the folder being written, where it holds no such file."""
    for entry in sorted(aside.iterdir()) if aside is not None else ():
        goal = folder / entry.name
        if goal.exists():
            continue
        if entry.is_dir():
            shutil.copytree(entry, goal)
        else:
            shutil.copy2(entry, goal)


def settle(aside: Path | None, target: Path) -> None:
    """Remove what was set aside once it is in the checkpoint; put it back where there is none."""
    if aside is None:
        return
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.rename(target)
