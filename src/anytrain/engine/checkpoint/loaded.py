"""A checkpoint that was found whole, read part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytrain.core.errors import CheckpointError
from anytrain.engine.checkpoint import encode, tensors
from anytrain.engine.checkpoint.files import Damaged, read_checked
from anytrain.engine.checkpoint.manifest import Manifest, PartFiles
from anytrain.engine.checkpoint.model import load_weights


class Loaded:
    """A whole checkpoint; each part is read, and checked once more, when it is asked for."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.step = manifest.step
        self.world_size = manifest.world_size
        self.metrics: Mapping[str, float] = manifest.metrics
        self.part_names = tuple(manifest.parts)
        self.rank_part_names = tuple(manifest.rank_parts)
        self.num_models = len(manifest.models)

    @property
    def meta(self) -> dict[str, Any]:
        """What the snapshot's meta held."""
        meta: dict[str, Any] = encode.decode(self.manifest.meta, {})
        return meta

    def part(self, name: str) -> Any:
        """Return a part's state, or raise CheckpointError naming the parts there are."""
        if name not in self.manifest.parts:
            raise self._absent(f"part {name!r}", f"it holds {_listed(self.part_names)}")
        return self._state(self.manifest.parts[name])

    def rank_part(self, name: str, rank: int) -> Any:
        """Return what one rank put into a part of its own."""
        if name not in self.manifest.rank_parts:
            names = _listed(self.rank_part_names)
            raise self._absent(f"part {name!r} of a rank", f"its ranks hold {names}")
        if not 0 <= rank < self.world_size:
            raise self._absent(
                f"part {name!r} of rank {rank}", f"it was written by {self.world_size} ranks"
            )
        return self._state(self.manifest.rank_parts[name][rank])

    def model(self, index: int = 0) -> dict[str, Any]:
        """Return a model's state dict; names that shared a tensor share it again."""
        if not 0 <= index < self.num_models:
            raise self._absent(f"model {index}", f"it holds {self.num_models} models")
        files = self.manifest.models[index]
        weights: dict[str, Any] = dict(self._tensors(files.tensors))
        if files.extra is not None:
            weights.update(self._state(files.extra))
        for name, kept in files.ties.items():
            weights[name] = weights[kept]
        return weights

    def load_model(
        self, model: nn.Module, index: int = 0, *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Put a model's weights into a module; see `load_weights`."""
        source = str(self.path / self.manifest.models[index].tensors[0]) if self.num_models else ""
        return load_weights(model, self.model(index), strict=strict, source=source)

    def _state(self, part: PartFiles) -> Any:
        held = self._tensors(part.tensors)
        try:
            raw = read_checked(self.path, part.document, self.manifest.files[part.document])
            document = encode.from_json(raw, part.document)
            return encode.decode(document, held, part.document)
        except Damaged as damage:
            raise self._damaged(damage) from damage

    def _tensors(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        held: dict[str, torch.Tensor] = {}
        try:
            for name in names:
                raw = read_checked(self.path, name, self.manifest.files[name])
                held.update(tensors.read(raw, name))
        except Damaged as damage:
            raise self._damaged(damage) from damage
        return held

    def _absent(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"Checkpoint {self.path} has no {what}.",
            why=f"{why}.",
            fix="resume with the objects that were saved; starting one of them afresh would be "
            "another run.",
        )

    def _damaged(self, damage: Damaged) -> CheckpointError:
        return damaged_error(self.path, [(damage.file, damage.why)], len(self.manifest.files))


def damaged_error(
    path: Path, problems: Sequence[tuple[str, str]], num_files: int
) -> CheckpointError:
    """Return the error for a checkpoint that must not be loaded."""
    good = max(num_files - len(problems), 0)
    count = f": {good} of its {num_files} files match the manifest" if num_files else ""
    return CheckpointError(
        f"Checkpoint {path} is not whole{count}.",
        why="; ".join(f"{file}: {why}" for file, why in problems) + ".",
        fix="resume from an earlier one: `anytrain checkpoint list` shows which there are.",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
