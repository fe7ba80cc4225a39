"""A model's weights as files that others can load, and back into a model.

An export is not a checkpoint: each of its files is written beside its name and renamed.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from anytrain.core.errors import BadInput, CheckpointError, DiskFull
from anytrain.core.notices import give_notice
from anytrain.engine.checkpoint import files
from anytrain.engine.checkpoint.encode import identity, oddity
from anytrain.engine.checkpoint.schema import shown
from anytrain.engine.checkpoint.tensors import CODES, TensorFile, shards
from anytrain.machine.strategies.solo import load_whole


@dataclass(frozen=True, slots=True)
class ModelState:
    """What of a model goes into a checkpoint."""

    weights: Mapping[str, Any]
    beside: Mapping[str, str] = field(default_factory=dict)
    """Texts by file name, which let other libraries build the model: config.json."""
    buffers: frozenset[str] = frozenset()
    """Weights that no optimizer moves: a mask may hold infinities."""
    aliases: frozenset[str] = frozenset()
    """Names that the model itself calls copies of another."""


def model_state(model: nn.Module, weights: Mapping[str, Any] | None = None) -> ModelState:
    """Return what to save of a model; `weights` stands in for its state dict."""
    state = model.state_dict() if weights is None else weights
    return ModelState(
        weights=state,
        beside=_beside(model),
        buffers=frozenset(name for name, _ in model.named_buffers()) & frozenset(state),
        aliases=frozenset(_aliases(model)),
    )


def host_weights(model: nn.Module) -> dict[str, Any] | None:
    """Return the weights on the host, ties kept, where others could not read them; else None."""
    state = model.state_dict()
    if not any(isinstance(v, torch.Tensor) and v.device.type == "xla" for v in state.values()):
        return None
    here: dict[tuple[object, ...], torch.Tensor] = {}
    for value in state.values():
        if isinstance(value, torch.Tensor) and identity(value) not in here:
            here[identity(value)] = value.cpu()
    return {
        name: here[identity(value)] if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def split(state: ModelState) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """Return the tensors to store once each, the ties to them, and what is no plain tensor."""
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, value in state.weights.items():
        if isinstance(value, torch.Tensor) and oddity(value) is None and value.dtype in CODES:
            groups.setdefault(identity(value), []).append(name)
        else:
            extra[name] = value
    ties: dict[str, str] = {}
    for names in groups.values():
        kept = next((name for name in names if name not in state.aliases), names[0])
        tensors[kept] = state.weights[kept].detach()
        ties.update({name: kept for name in names if name != kept})
    return {name: tensors[name] for name in state.weights if name in tensors}, ties, extra


Load: TypeAlias = Callable[[nn.Module, Mapping[str, Any]], None]
"""Put a whole state dict into a model, which may have other names: a strategy's `load`."""


def load_weights(
    model: nn.Module,
    weights: Mapping[str, Any],
    *,
    strict: bool = True,
    source: str = "the file",
    load: Load = load_whole,
) -> tuple[list[str], list[str]]:
    """Put weights into a model, and return the names it missed and those it has no place for.

    Everything is checked before the first weight is touched. With `strict` a missing or an
    unexpected name is an error; a shape that does not fit is one too, unless the model loads in
    a way of its own: it may grow a buffer first. A name that shares its tensor with another is
    not missed when the other is there.
    """
    missing, unexpected = check_fit(model, weights, strict=strict, source=source)
    _notice_casts(model.state_dict(), weights, source)
    load(model, dict(weights))
    return missing, unexpected


def check_fit(
    model: nn.Module, weights: Mapping[str, Any], *, strict: bool = True, source: str = "the file"
) -> tuple[list[str], list[str]]:
    """Raise CheckpointError where a model cannot take the weights, or their outline.

    Return the names that it misses and those that it has no place for.
    """
    own = model.state_dict()
    loads_itself = type(model).load_state_dict is not nn.Module.load_state_dict
    missing = _missing(own, weights)
    unexpected = [name for name in weights if name not in own]
    wrong = [
        f"{name} is {shown(value)} in {source} and a tensor in the model"
        for name, value in weights.items()
        if isinstance(own.get(name), torch.Tensor) and not isinstance(value, torch.Tensor)
    ]
    wrong += [
        f"{name} is {tuple(value.shape)} in {source} and {tuple(own[name].shape)} in the model"
        for name, value in weights.items()
        if isinstance(value, torch.Tensor)
        and isinstance(own.get(name), torch.Tensor)
        and value.shape != own[name].shape
    ]
    wrong += [
        f"{name} is of {value.dtype} in {source} and of {own[name].dtype} in the model"
        for name, value in weights.items()
        if isinstance(value, torch.Tensor)
        and isinstance(own.get(name), torch.Tensor)
        and own[name].is_floating_point()
        and not value.is_floating_point()
    ]
    if (wrong and not loads_itself) or (strict and (missing or unexpected)):
        raise _unfit(model, source, missing if strict else [], unexpected if strict else [], wrong)
    return missing, unexpected


def _beside(model: nn.Module) -> dict[str, str]:
    texts = {}
    config = _json_of(getattr(model, "config", None))
    if config is not None:
        dtype = getattr(model, "dtype", None)
        config["architectures"] = [type(model).__name__]
        if isinstance(dtype, torch.dtype):
            config["dtype"] = str(dtype).removeprefix("torch.")
        texts["config.json"] = config
    generation = _json_of(getattr(model, "generation_config", None))
    if generation is not None:
        texts["generation_config.json"] = generation
    return {name: json.dumps(text, indent=2, sort_keys=True) + "\n" for name, text in texts.items()}


def _json_of(config: object) -> dict[str, Any] | None:
    """Return a config of the transformers kind as its own JSON says it."""
    to_json = getattr(config, "to_json_string", None)
    found = json.loads(to_json()) if callable(to_json) else None
    return found if isinstance(found, dict) else None


def _aliases(model: nn.Module) -> list[str]:
    """Return the names that a transformers model fills from another when it is loaded."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", [])
    return [str(name) for name in tied or []]


def _missing(own: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    given = {identity(own[n]) for n in weights if isinstance(own.get(n), torch.Tensor)}
    return [
        name
        for name, value in own.items()
        if name not in weights
        and not (isinstance(value, torch.Tensor) and identity(value) in given)
    ]


def _notice_casts(own: Mapping[str, Any], weights: Mapping[str, Any], source: str) -> None:
    casts = {
        (value.dtype, own[name].dtype)
        for name, value in weights.items()
        if isinstance(value, torch.Tensor)
        and isinstance(own.get(name), torch.Tensor)
        and value.dtype != own[name].dtype
    }
    for found, wanted in sorted(casts, key=str):
        text = f"{source} holds {found} where the model has {wanted}: the weights are converted."
        give_notice(text, stacklevel=3)


def _unfit(
    model: nn.Module, source: str, missing: list[str], unexpected: list[str], wrong: list[str]
) -> CheckpointError:
    reasons = [f"{source} lacks {_listed(missing)}"] if missing else []
    reasons += [f"the model has no {_listed(unexpected)}"] if unexpected else []
    reasons += [_listed(wrong)] if wrong else []
    return CheckpointError(
        f"Cannot load {source} into {type(model).__name__}.",
        why="; ".join(reasons) + ".",
        fix="build the model as it was when it was saved"
        + ("." if wrong else "; where names may differ, load it with load_state(strict=False)."),
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "B": 1}


def export_model(
    model: nn.Module, folder: Path, *, max_shard_size: int | str, safe_serialization: bool
) -> None:
    """Write the weights to `folder`, in shards of at most `max_shard_size`."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise BadInput(
            "Cannot save a model whose parameters are on the meta device.",
            why="they have shapes and no values.",
            fix="load or initialise the weights first.",
        )
    tensors, ties, _ = split(model_state(model))
    stem = "model" if safe_serialization else "pytorch_model"
    metadata = {"format": "pt", **ties}
    parts = shards(stem, tensors, size_in_bytes(max_shard_size), metadata)
    files.make_folders(folder)
    for part in parts:
        name = part.name if safe_serialization else part.name.replace(".safetensors", ".bin")
        part.name = name
        _write(folder / name, part.chunks() if safe_serialization else _pickled(part.tensors))
    index = folder / f"{stem}.{'safetensors' if safe_serialization else 'bin'}.index.json"
    if len(parts) > 1:
        _write(index, [_index(parts)])
    _remove_stale(folder, stem, {part.name for part in parts}, index if len(parts) > 1 else None)


def export_object(obj: Any, path: Path, *, safe_serialization: bool) -> None:
    """Write one object: tensors by name as safetensors, anything as torch.save does."""
    if not safe_serialization:
        _write(path, _pickled(obj))
        return
    if not isinstance(obj, Mapping) or not all(isinstance(v, torch.Tensor) for v in obj.values()):
        raise BadInput(
            f"Cannot write a {type(obj).__name__} as safetensors.",
            why="a safetensors file holds tensors by name and nothing else.",
            fix="pass a state dict, or safe_serialization=False.",
        )
    seen: dict[tuple[Any, ...], str] = {}
    kept, metadata = {}, {"format": "pt"}
    for name, tensor in obj.items():
        storage = identity(tensor)
        if tensor.numel() and storage in seen:
            metadata[name] = seen[storage]
        else:
            seen[storage] = name
            kept[name] = tensor
    _write(path, TensorFile(path.name, kept, metadata).chunks())


def size_in_bytes(size: int | str) -> int:
    """Return a size that may be written with a unit.

    >>> size_in_bytes("1.5KB"), size_in_bytes("2MiB"), size_in_bytes(7)
    (1500, 2097152, 7)
    """
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]+)\s*", size)
    if found is None or found[2].upper() not in _UNITS:
        raise BadInput(
            f"Cannot read the size {size!r}.",
            why=f"the known units are {', '.join(_UNITS)}.",
            fix='write "10GB" or "500MiB", or pass a number of bytes.',
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _write(path: Path, chunks: Iterable[Any]) -> None:
    files.make_folders(path.parent)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        files.write_file(aside, chunks)
        files.rename(aside, path)
    except OSError as error:
        if error.errno not in files.NO_ROOM:
            raise
        free = files.free_bytes(path.parent)
        raise DiskFull(
            f"Cannot write {path}.",
            why=f"{path.parent} has {free:,} bytes left, which is too little for it.",
            fix="make room there, or save to another disk.",
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    files.sync_folder(path.parent)


def _pickled(obj: Any) -> Iterable[bytes]:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return [buffer.getvalue()]


def _index(parts: list[TensorFile]) -> bytes:
    places = {name: part.name for part in parts for name in part.tensors}
    total = sum(part.num_bytes for part in parts)
    document = {"metadata": {"total_size": total}, "weight_map": places}
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _remove_stale(folder: Path, stem: str, written: set[str], index: Path | None) -> None:
    """Remove shards of an earlier export that this one did not replace."""
    shape = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.(safetensors|bin)(\.index\.json)?")
    keep = written | ({index.name} if index else set())
    for name in os.listdir(folder):
        if shape.fullmatch(name) and name not in keep:
            (folder / name).unlink(missing_ok=True)
