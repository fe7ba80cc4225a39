"""What one save holds, and the files it becomes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from anytrain.core.errors import BadInput, CheckpointError
from anytrain.engine.checkpoint.encode import encode, to_json
from anytrain.engine.checkpoint.files import Buffer
from anytrain.engine.checkpoint.manifest import MANIFEST, ModelFiles, PartFiles
from anytrain.engine.checkpoint.model import ModelState, model_state, split
from anytrain.engine.checkpoint.tensors import TensorFile, nonfinite, shards
from anytrain.machine.strategies.base import Part

MOST_SHARD_BYTES = 5 * 10**9
_SMALL_PART_BYTES = 1 << 20
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_METADATA = {"format": "pt"}

AnyModel: TypeAlias = nn.Module | ModelState | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that one checkpoint holds, as the objects themselves say it.

    Models and parts are the same on every rank and are written by one; a rank's own parts are
    written by each. `finite` names the parts that must hold no NaN or infinity; None means those
    that are called optimizer.
    """

    step: int
    models: Sequence[AnyModel] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    rank_parts: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    finite: Sequence[str] | None = None
    writers: Mapping[str, int] = field(default_factory=dict)
    """The rank that writes a model (`model`, `model_1`) or a part; what is not named: rank 0."""


SnapshotSource: TypeAlias = Snapshot | Callable[[Path], Snapshot]


@dataclass
class TextFile:
    """A file of text to be written."""

    name: str
    data: bytes

    @property
    def num_bytes(self) -> int:
        """The bytes that the file takes."""
        return len(self.data)

    def chunks(self) -> Iterator[Buffer]:
        """Yield the file's bytes."""
        yield self.data


@dataclass
class Guard:
    """Tensors of one file that must be finite, and those that must hold no NaN."""

    file: TensorFile
    finite: frozenset[str]
    not_nan: frozenset[str] = frozenset()

    def broken(self) -> tuple[str, str] | None:
        """Return the first tensor that breaks the rule, and what it holds."""
        return nonfinite(self.file.tensors, self.finite, self.not_nan)


@dataclass
class Shared:
    """What this rank writes of several parts together, as each file costs a wait for the disk."""

    stem: str
    documents: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    finite: set[str] = field(default_factory=set)

    @property
    def document(self) -> str:
        """The file of the documents."""
        return f"{self.stem}.json"


@dataclass
class Contents:
    """The files that this rank writes, and what they are for."""

    step: int
    meta: Any
    metrics: dict[str, float]
    texts: list[TextFile] = field(default_factory=list)
    tensors: list[TensorFile] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    models: dict[str, ModelFiles] = field(default_factory=dict)
    """Of the models that this rank writes, by their place among all."""
    parts: dict[str, PartFiles] = field(default_factory=dict)
    rank_parts: dict[str, PartFiles] = field(default_factory=dict)
    shared: Shared = field(default_factory=lambda: Shared(""))

    @property
    def files(self) -> list[TextFile | TensorFile]:
        """Every file, in the order of writing."""
        return [*self.texts, *self.tensors]

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank is about to write."""
        return sum(file.num_bytes for file in self.files)


def writer_of(name: str, parts: Iterable[Part]) -> int:
    """Return the rank that writes a model or an optimizer, which a strategy says lies in parts.

    The files have room for tensors that are whole on one rank.
    """
    writers = set()
    for part in parts:
        if tuple(part.tensor.shape) != part.whole:
            raise CheckpointError(
                f"Cannot save {name}: {part.name} is shared among ranks.",
                why=f"this rank holds {tuple(part.tensor.shape)} of {part.whole}, and a "
                "checkpoint holds whole tensors.",
                fix="choose a strategy whose ranks hold whole tensors.",
            )
        writers.add(part.writer)
    if len(writers) > 1:
        raise CheckpointError(
            f"Cannot save {name}: ranks {sorted(writers)} each write some of it.",
            why="a model or an optimizer is written by one rank.",
            fix="let the strategy name one writer.",
        )
    return writers.pop() if writers else 0


def lay_out(snapshot: Snapshot, rank: int, most_bytes: int = MOST_SHARD_BYTES) -> Contents:
    """Return what this rank writes; CheckpointError names a value that no file can hold."""
    writers = snapshot.writers
    contents = Contents(
        step=int(snapshot.step),
        meta=_plain_meta(snapshot.meta),
        metrics={str(name): float(value) for name, value in snapshot.metrics.items()},
        shared=Shared(f"state-rank{rank}" if rank else "state"),
    )
    for name in (*snapshot.parts, *snapshot.rank_parts):
        _check_part_name(name)
    for index, model in enumerate(snapshot.models):
        if writers.get(f"model_{index}" if index else "model", 0) == rank:
            contents.models[str(index)] = _add_model(contents, model, index, most_bytes)
    for name, state in snapshot.parts.items():
        if writers.get(name, 0) == rank:
            guarded = _is_guarded(name, snapshot.finite)
            contents.parts[name] = _add_part(contents, name, name, state, most_bytes, guarded)
    for name, state in snapshot.rank_parts.items():
        stem = f"{name}-rank{rank}"
        contents.rank_parts[name] = _add_part(contents, stem, name, state, most_bytes)
    _close_shared(contents, most_bytes)
    _check_distinct(contents)
    return contents


def _add_part(
    contents: Contents, stem: str, name: str, state: Any, most_bytes: int, guarded: bool = False
) -> PartFiles:
    encoded, shared = encode(state, name), contents.shared
    if stem in shared.documents:
        raise _collision(stem)
    shared.documents[stem] = encoded.document
    tensors = {f"{stem}/{key}": tensor for key, tensor in encoded.tensors.items()}
    is_small = sum(tensor.nbytes for tensor in tensors.values()) <= _SMALL_PART_BYTES
    if is_small and not name.startswith("optimizer"):  # whose file people look for
        shared.tensors |= tensors
        shared.finite |= tensors.keys() if guarded else set()
        return PartFiles(shared.document, key=stem)
    made = shards(stem, tensors, most_bytes, _METADATA) if tensors else []
    contents.tensors += made
    if guarded:
        contents.guards += [Guard(file, frozenset(file.tensors)) for file in made]
    return PartFiles(shared.document, tuple(file.name for file in made), stem)


def _close_shared(contents: Contents, most_bytes: int) -> None:
    """Lay out the files of several parts, and tell each of these where its tensors are."""
    shared = contents.shared
    if not shared.documents:
        return
    contents.texts.append(TextFile(shared.document, to_json(shared.documents)))
    made = shards(shared.stem, shared.tensors, most_bytes, _METADATA) if shared.tensors else []
    contents.tensors += made
    contents.guards += [
        Guard(file, frozenset(shared.finite & file.tensors.keys())) for file in made
    ]

    def placed(part: PartFiles) -> PartFiles:
        own = [f.name for f in made if any(name.startswith(f"{part.key}/") for name in f.tensors)]
        return replace(part, tensors=(*part.tensors, *own))

    contents.parts = {name: placed(part) for name, part in contents.parts.items()}
    contents.rank_parts = {name: placed(part) for name, part in contents.rank_parts.items()}
    contents.models = {
        index: replace(model, extra=placed(model.extra)) if model.extra else model
        for index, model in contents.models.items()
    }


def _add_model(contents: Contents, model: AnyModel, index: int, most_bytes: int) -> ModelFiles:
    state = _state_of(model)
    ending = f"_{index}" if index else ""
    tensors, ties, extra = split(state)
    made = shards(f"model{ending}", tensors, most_bytes, _METADATA)
    contents.tensors += made
    for file in made:
        held = frozenset(file.tensors)
        contents.guards.append(Guard(file, held - state.buffers, held & state.buffers))
    beside = [TextFile(_numbered(n, ending), t.encode()) for n, t in state.beside.items()]
    if len(made) > 1:
        beside.append(TextFile(f"model{ending}.safetensors.index.json", _index(made)))
    contents.texts += beside
    name = f"model{ending}-extra"
    return ModelFiles(
        tensors=tuple(file.name for file in made),
        ties=ties,
        extra=_add_part(contents, name, f"model{ending}", extra, most_bytes) if extra else None,
        beside=tuple(file.name for file in beside),
    )


def _state_of(model: AnyModel) -> ModelState:
    if isinstance(model, ModelState):
        return model
    return model_state(model) if isinstance(model, nn.Module) else ModelState(model)


def _numbered(name: str, ending: str) -> str:
    stem, dot, kind = name.partition(".")
    return f"{stem}{ending}{dot}{kind}"


def _index(made: Sequence[TensorFile]) -> bytes:
    """Return the index that transformers reads to find a tensor among the shards."""
    tensors: list[torch.Tensor] = [t for file in made for t in file.tensors.values()]
    total = {
        "total_size": sum(tensor.nbytes for tensor in tensors),
        "total_parameters": sum(tensor.numel() for tensor in tensors),
    }
    weight_map = {name: file.name for file in made for name in file.tensors}
    contents = {"metadata": total, "weight_map": weight_map}
    return json.dumps(contents, indent=2, sort_keys=True).encode() + b"\n"


def _plain_meta(meta: Mapping[str, Any]) -> Any:
    encoded = encode(dict(meta), "meta")
    if encoded.tensors:
        raise BadInput(
            f"Cannot put the tensor {next(iter(encoded.tensors))!r} into meta.",
            why="meta is kept in the manifest, which is text.",
            fix="make it a part of its own: Snapshot(parts={...}).",
        )
    return encoded.document


def _is_guarded(name: str, finite: Sequence[str] | None) -> bool:
    return name.startswith("optimizer") if finite is None else name in finite


def _check_part_name(name: str) -> None:
    if not isinstance(name, str) or not _PART_NAME.fullmatch(name):
        raise BadInput(
            f"Cannot name a part {name!r}.",
            why="it becomes a file's name: letters, digits, '.', '-' and '_', no dot first.",
            fix="choose a plain name, such as 'optimizer_1'.",
        )


def _check_distinct(contents: Contents) -> None:
    """Refuse two files of one name, also where the filesystem knows no upper case."""
    seen = {MANIFEST}
    for file in contents.files:
        if file.name.casefold() in seen:
            raise _collision(file.name)
        seen.add(file.name.casefold())


def _collision(name: str) -> BadInput:
    return BadInput(
        f"Two parts of the checkpoint would be written to {name!r}.",
        why="models, parts and a rank's parts share one folder.",
        fix="rename one of the parts.",
    )
