"""Compare the tensors that two runs have left beside their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from anytrain.engine.checkpoint.manifest import MANIFEST
from anytrain.insight.proofs.compare import Difference, Part, compare_states

_TORCH = (".pt", ".pth", ".bin")
_ENDINGS = (".safetensors", *_TORCH)


def compare_artifacts(one: Path, other: Path) -> list[Part]:
    """Return every tensor file outside the checkpoints compared, by its path in the project."""
    mine, theirs = _files(one), _files(other)
    parts = []
    for name in sorted(mine | theirs):
        if name in mine and name in theirs:
            parts.append(_compare(name, one / name, other / name))
        else:
            which = "second" if name in mine else "first"
            missing = Difference(f"the file {name}", f"is missing in the {which}")
            parts.append(Part(name, differences=[missing]))
    return parts


def _files(project: Path) -> set[str]:
    return {
        str(path.relative_to(project))
        for path in project.rglob("*")
        if path.suffix in _ENDINGS and path.is_file() and not _in_checkpoint(path, project)
    }


def _in_checkpoint(path: Path, project: Path) -> bool:
    inner = path.relative_to(project)
    hidden = any(part.startswith(".") for part in inner.parts[:-1])
    return hidden or any((project / p / MANIFEST).exists() for p in inner.parents if p.parts)


def _compare(name: str, one: Path, other: Path) -> Part:
    if one.read_bytes() == other.read_bytes():
        return Part(name, num_tensors=compare_states(name, _read(one), {}).num_tensors)
    found = compare_states(name, _read(one), _read(other))
    if not found.differences and not found.num_tensors:
        found.differences.append(Difference(f"the file {name}", "differs"))
    return found


def _read(path: Path) -> Any:
    """Return a file's tensors; nothing where reading it would mean running it."""
    try:
        if path.suffix in _TORCH:
            return torch.load(path, map_location="cpu", weights_only=True)
        return load_file(path)
    except Exception:  # noqa: BLE001 -- a file of any kind may have such a name
        return {}
