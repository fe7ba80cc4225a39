"""A checkpoint that was found whole, read part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from anytrain.core.errors import CheckpointError
from anytrain.core.text import amount
from anytrain.engine.checkpoint import encode, tensors
from anytrain.engine.checkpoint.files import Damaged, read_checked
from anytrain.engine.checkpoint.finite import nonfinite
from anytrain.engine.checkpoint.manifest import MANIFEST, Manifest, PartFiles
from anytrain.engine.checkpoint.model import load_weights
from anytrain.engine.checkpoint.schema import Anything, Description, Misfit, Named, check

_Reader: TypeAlias = Callable[[Path, str], Mapping[str, torch.Tensor]]


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
        try:
            meta: dict[str, Any] = encode.decode(self.manifest.meta, {}, MANIFEST)
        except Damaged as damage:
            raise self._damaged(damage) from damage
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
                f"part {name!r} of rank {rank}",
                f"it was written by {amount(self.world_size, 'rank')}",
            )
        return self._state(self.manifest.rank_parts[name][rank])

    def outline(self, name: str) -> Any:
        """Return a part's state with large tensors as outlines, which have no values."""
        if name not in self.manifest.parts:
            return self.part(name)
        return self._state(self.manifest.parts[name], tensors.outline)

    def model(self, index: int = 0, *, outline: bool = False) -> dict[str, Any]:
        """Return a model's state dict; names that shared a tensor share it again.

        Its outline has tensors without values: nothing but the files' headers is read.
        """
        if not 0 <= index < self.num_models:
            raise self._absent(f"model {index}", f"it holds {amount(self.num_models, 'model')}")
        files = self.manifest.models[index]
        read = tensors.outline if outline else None
        weights: dict[str, Any] = dict(self._tensors(files.tensors, read))
        if files.extra is not None:
            extra = self._state(files.extra, read)
            with blaming(self.path, str(files.extra)):
                check(extra, Named(Anything()))
            weights.update(extra)
        for name, kept in files.ties.items():
            with blaming(self.path, MANIFEST):
                check(weights, {kept: Anything()}, f"models[{index}].ties.{name}")
            weights[name] = weights[kept]
        return weights

    def check(self, name: str, wanted: Description | Callable[[Any], None]) -> None:
        """Raise CheckpointError, naming file and field, where a part is not as described."""
        self._check(self.manifest.parts.get(name), self.outline(name), wanted)

    def check_rank(self, name: str, rank: int, wanted: Description | Callable[[Any], None]) -> None:
        """Do the same for what one rank put into a part of its own."""
        state = self.rank_part(name, rank)
        self._check(self.manifest.rank_parts[name][rank], state, wanted)

    def _check(
        self, part: PartFiles | None, state: Any, wanted: Description | Callable[[Any], None]
    ) -> None:
        with blaming(self.path, "" if part is None else str(part)):
            if callable(wanted):
                wanted(state)
            else:
                check(state, wanted)

    def load_model(
        self, model: nn.Module, index: int = 0, *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Put a model's weights into a module; see `load_weights`.

        No save writes a parameter that is not finite or a buffer with a NaN: neither is loaded.
        """
        weights = self.model(index)
        self._check_finite(model, weights, self.manifest.models[index].tensors)
        return load_weights(model, weights, strict=strict, source=self.source(index))

    def _check_finite(
        self, model: nn.Module, weights: Mapping[str, Any], files: Sequence[str]
    ) -> None:
        own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        held = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        if (broken := nonfinite(held, own, held)) is None:
            return
        name, value = broken
        file = next((f for f in files if name in tensors.outline(self.path, f)), MANIFEST)
        raise misfit_error(self.path, file, Misfit(f"{name} holds {value}"))

    def source(self, index: int) -> str:
        """Return where a model's weights are, to name it in an error."""
        files = self.manifest.models[index].tensors if index < self.num_models else ()
        return str(self.path / (files[0] if files else MANIFEST))

    def _state(self, part: PartFiles, read: _Reader | None = None) -> Any:
        held = self._tensors(part.tensors, read)
        try:
            raw = read_checked(self.path, part.document, self.manifest.files[part.document])
            document = encode.from_json(raw, part.document)
            if part.key is not None:
                document, held = _of_part(document, held, part.key, part.document)
            return encode.decode(document, held, str(part))
        except Damaged as damage:
            raise self._damaged(damage) from damage

    def _tensors(
        self, names: Sequence[str], read: _Reader | None = None
    ) -> dict[str, torch.Tensor]:
        held: dict[str, torch.Tensor] = {}
        try:
            for name in names:
                if read is not None:
                    held.update(read(self.path, name))
                    continue
                raw = read_checked(self.path, name, self.manifest.files[name])
                held.update(tensors.read(raw, name))
        except Damaged as damage:
            raise self._damaged(damage) from damage
        return held

    def _absent(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"Checkpoint {self.path} has no {what}.",
            why=f"{why}, says {MANIFEST}.",
            fix="resume with the objects that were saved; starting one of them afresh would be "
            "another run.",
        )

    def _damaged(self, damage: Damaged) -> CheckpointError:
        return damaged_error(self.path, [(damage.file, damage.why)], len(self.manifest.files))


def _of_part(
    document: Any, held: dict[str, torch.Tensor], key: str, file: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return what files of several parts hold of one, its tensors under their own names."""
    if not isinstance(document, dict) or key not in document:
        raise Damaged(file, f"it holds nothing of {key!r}")
    start = f"{key}/"
    return document[key], {n.removeprefix(start): t for n, t in held.items() if n.startswith(start)}


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


@contextmanager
def blaming(path: Path, file: str) -> Iterator[None]:
    """Turn a Misfit of the block into the error that names the file."""
    try:
        yield
    except Misfit as misfit:
        raise misfit_error(path, file, misfit) from misfit


def misfit_error(path: Path, file: str, misfit: Misfit) -> CheckpointError:
    """Return the error for a file that is whole and holds what no run has saved."""
    return CheckpointError(
        f"Cannot load {path}: {file} does not hold what it must.",
        why=f"{file}: {misfit}. The file is as its checksum says, so it was written like this.",
        fix="resume from another one: `anytrain checkpoint list` shows which there are.",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
