"""What a checkpoint says of itself: its files, their checksums, and what they hold.

The manifest is written last and checks itself too: its bytes must be exactly what writing its
contents again gives, and they carry their own checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anytrain.engine.checkpoint.files import DIGEST_BYTES, Damaged, Fingerprint, read_small
from anytrain.engine.checkpoint.schema import (
    Anything,
    Each,
    Either,
    Maybe,
    Misfit,
    Named,
    Number,
    Text,
    Whole,
    check,
    shown,
)

MANIFEST = "manifest.json"
FORMAT = 2
_READABLE = (1, FORMAT)
"""In format 1 each part has a document of its own."""
KIND = "anytrain checkpoint"
_MOST_BYTES = 256 << 20
_HEX = frozenset("0123456789abcdef")
_PART = {"document": Text(), "tensors": Each(Text()), "key?": Maybe(Text())}
_MODEL = {
    "tensors": Each(Text()),
    "ties": Named(Text()),
    "extra": Maybe(_PART),
    "beside": Each(Text()),
}
_FIELDS = {
    "step": Whole(),
    "created_ns": Whole(most=2**63),
    "world_size": Whole(1, 2**20),
    "files": Named({"bytes": Whole(), "blake2b": Text()}),
    "models": Each(_MODEL),
    "parts": Named(_PART),
    "rank_parts": Named(Each(_PART)),
    "metrics": Named(Either(Text(("nan", "inf", "-inf")), Number())),
    "meta": Maybe(Named(Anything())),
    "versions": Named(Text()),
}


@dataclass(frozen=True, slots=True)
class PartFiles:
    """Where one part's document and tensors are."""

    document: str
    tensors: tuple[str, ...] = ()
    key: str | None = None
    """The part's name in files that hold several parts; None where they hold it alone."""

    def __str__(self) -> str:
        return self.document if self.key is None else f"{self.document}, {self.key}"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where one model's tensors are, and which names share another's tensor."""

    tensors: tuple[str, ...]
    ties: Mapping[str, str] = field(default_factory=dict)
    extra: PartFiles | None = None
    """What the state dict holds besides tensors."""
    beside: tuple[str, ...] = ()
    """Files that make the folder loadable elsewhere: config.json, the index of the shards."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of manifest.json."""

    step: int
    created_ns: int
    world_size: int
    files: Mapping[str, Fingerprint]
    models: tuple[ModelFiles, ...] = ()
    parts: Mapping[str, PartFiles] = field(default_factory=dict)
    rank_parts: Mapping[str, tuple[PartFiles, ...]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    meta: Any = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The bytes of all files but the manifest."""
        return sum(file.num_bytes for file in self.files.values())


def to_bytes(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json."""
    body = _dump(_contents(manifest))
    return _signed(body, _checksum(body))


def read(folder: Path) -> Manifest:
    """Return the folder's manifest, or raise Damaged with the reason."""
    raw = read_small(folder, MANIFEST, _MOST_BYTES)
    try:
        contents = json.loads(raw)
        if not isinstance(contents, dict) or contents.get("kind") != KIND:
            raise Damaged(MANIFEST, "it is not an anytrain manifest")
        check(contents, {"blake2b": Text(), "format": Whole()})
        digest = contents.pop("blake2b")
        if contents["format"] not in _READABLE:
            raise Damaged(
                MANIFEST, f"its format {contents['format']!r} is not known here: {FORMAT}"
            )
        body = _dump(contents)
        if digest != _checksum(body) or raw != _signed(body, digest):
            raise Damaged(MANIFEST, "its bytes changed: its own checksum does not match")
        check(contents, _FIELDS)
        return _from_contents(contents)
    except Misfit as misfit:
        raise Damaged(MANIFEST, str(misfit)) from misfit
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(MANIFEST, f"it cannot be read: {type(error).__name__}: {error}") from error


def check_name(name: str) -> str:
    """Return a file's name if it stays inside its folder, or raise Damaged.

    >>> check_name("unet/model.safetensors")
    'unet/model.safetensors'
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    odd = any(part in ("", ".", "..") for part in parts) or "\\" in str(name) or "\0" in str(name)
    if odd or Path(name).is_absolute() or parts[0].endswith(":"):
        raise Damaged(MANIFEST, f"it names {name!r}, which is not a file inside the folder")
    return name


def _contents(manifest: Manifest) -> dict[str, Any]:
    return {
        "kind": KIND,
        "format": FORMAT,
        "step": manifest.step,
        "created_ns": manifest.created_ns,
        "world_size": manifest.world_size,
        "files": {
            name: {"bytes": file.num_bytes, "blake2b": file.blake2b}
            for name, file in manifest.files.items()
        },
        "models": [
            {
                "tensors": list(model.tensors),
                "ties": dict(model.ties),
                "extra": _part_contents(model.extra) if model.extra else None,
                "beside": list(model.beside),
            }
            for model in manifest.models
        ],
        "parts": {name: _part_contents(part) for name, part in manifest.parts.items()},
        "rank_parts": {
            name: [_part_contents(part) for part in parts]
            for name, parts in manifest.rank_parts.items()
        },
        "metrics": {
            name: value if math.isfinite(value) else str(value)
            for name, value in manifest.metrics.items()
        },
        "meta": manifest.meta,
        "versions": dict(manifest.versions),
    }


def _part_contents(part: PartFiles) -> dict[str, Any]:
    key = {} if part.key is None else {"key": part.key}
    return {"document": part.document, "tensors": list(part.tensors), **key}


def _from_contents(contents: Mapping[str, Any]) -> Manifest:
    files = {check_name(name): _fingerprint(file) for name, file in contents["files"].items()}
    folded = [name.casefold() for name in files]
    if MANIFEST in folded or len(set(folded)) != len(folded):
        raise Damaged(MANIFEST, "it names a file twice, or itself")
    manifest = Manifest(
        step=contents["step"],
        created_ns=contents["created_ns"],
        world_size=contents["world_size"],
        files=files,
        models=tuple(model_files(model) for model in contents["models"]),
        parts={name: part_files(part) for name, part in contents["parts"].items()},
        rank_parts={
            name: tuple(part_files(part) for part in parts)
            for name, parts in contents["rank_parts"].items()
        },
        metrics={name: float(value) for name, value in contents["metrics"].items()},
        meta=contents["meta"],
        versions=contents["versions"],
    )
    for name in _named(manifest):
        if name not in files:
            raise Damaged(MANIFEST, f"it uses {name!r} and lists no such file")
    for name, parts in manifest.rank_parts.items():
        if len(parts) != manifest.world_size:
            raise Misfit(
                f"rank_parts.{name} has {len(parts)} entries, and world_size is "
                f"{manifest.world_size}"
            )
    return manifest


def _fingerprint(contents: Mapping[str, Any]) -> Fingerprint:
    size, digest = contents["bytes"], contents["blake2b"]
    if len(digest) != 2 * DIGEST_BYTES or set(digest) - _HEX:
        raise Misfit(f"files holds a blake2b that is {shown(digest)}, and must be a checksum")
    return Fingerprint(size, digest)


def part_files(contents: Mapping[str, Any]) -> PartFiles:
    """Return where a part is, as a manifest says it."""
    return PartFiles(contents["document"], tuple(contents["tensors"]), contents.get("key"))


def model_files(contents: Mapping[str, Any]) -> ModelFiles:
    """Return where a model is, as a manifest says it."""
    return ModelFiles(
        tensors=tuple(contents["tensors"]),
        ties=contents["ties"],
        extra=part_files(contents["extra"]) if contents["extra"] else None,
        beside=tuple(contents["beside"]),
    )


def _named(manifest: Manifest) -> list[str]:
    parts = [*manifest.parts.values(), *(p for ps in manifest.rank_parts.values() for p in ps)]
    parts += [model.extra for model in manifest.models if model.extra]
    names = [name for part in parts for name in (part.document, *part.tensors)]
    return names + [name for model in manifest.models for name in (*model.tensors, *model.beside)]


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).hexdigest()


def _signed(body: bytes, digest: str) -> bytes:
    """Return a document's bytes with its checksum as the last entry, without writing it again."""
    return body.removesuffix(b"\n}\n") + f',\n "blake2b": "{digest}"\n}}\n'.encode("ascii")


def _dump(contents: Mapping[str, Any]) -> bytes:
    text = json.dumps(contents, indent=1, allow_nan=False)
    return text.encode("ascii") + b"\n"
