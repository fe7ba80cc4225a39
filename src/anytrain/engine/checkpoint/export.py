"""Write a model's weights alone, or one object, for other programs to read.

Each file is written beside its name and renamed: it is whole or absent.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytrain.core.errors import BadInput, DiskFull
from anytrain.engine.checkpoint import files
from anytrain.engine.checkpoint.encode import identity
from anytrain.engine.checkpoint.model import model_state, split
from anytrain.engine.checkpoint.tensors import TensorFile, shards

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
