"""The safetensors layout: eight bytes of length, a JSON header, and the tensors' bytes.

It is written here and not by its library, because a save hashes each piece as it is written
and must be stoppable at each. It is read here too, from bytes that were already checked, so
that no byte is read twice or copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytrain.engine.checkpoint.files import Damaged, read_piece

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "C64": 8,
}
ODD = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a header ends in where it is none."""
_ALIGN = 8
_MOST_VALUES = 2**48
_MOST_HEADER_BYTES = 100_000_000  # the library's own limit


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file: its name, type, shape, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, list[Entry]]:
    """Return the bytes before the tensors, and the entries in the order of their bytes.

    Wide types come first, so that each tensor starts at a multiple of its own width.
    """
    ordered = sorted(entries, key=lambda e: (-DTYPE_BYTES[e.dtype], e.name))
    contents: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    placed, start = [], 0
    for entry in ordered:
        placed.append(Entry(entry.name, entry.dtype, entry.shape, start))
        span = [start, start + entry.num_bytes]
        contents[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": span,
        }
        start = span[1]
    text = json.dumps(contents, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text, placed


def read_entries(folder: Path, name: str) -> list[Entry]:
    """Return what a file's header says it holds; reads and checks no tensor."""
    length = read_piece(folder, name, 0, 8)
    size = min(int.from_bytes(length, "little"), _MOST_HEADER_BYTES)
    try:
        entries, _ = parse(read_piece(folder, name, 0, 8 + size), (folder / name).stat().st_size)
    except ODD as error:
        raise Damaged(name, f"it is not a safetensors file: {error}") from error
    return entries


def parse(
    data: bytes | bytearray, num_bytes: int | None = None
) -> tuple[list[Entry], dict[str, str]]:
    """Return a file's entries, with absolute starts, and its metadata; ValueError if odd.

    `data` may end after the header where `num_bytes` tells how long the whole file is.
    """
    size = int.from_bytes(data[:8], "little")
    whole = len(data) if num_bytes is None else num_bytes
    if len(data) < 8 or size > min(len(data) - 8, _MOST_HEADER_BYTES):
        raise ValueError("the header is longer than the file")
    contents = json.loads(bytes(data[8 : 8 + size]), object_pairs_hook=_once)
    metadata = contents.pop("__metadata__", {})
    entries = sorted(
        (_entry(name, value, 8 + size) for name, value in contents.items()), key=_place
    )
    end = 8 + size
    for entry in entries:
        if entry.start != end:
            raise ValueError(f"the bytes of {entry.name!r} overlap others or leave a gap")
        end += entry.num_bytes
    if end != whole:
        raise ValueError(f"the tensors end at byte {end:,} of {whole:,}")
    return entries, {str(key): str(value) for key, value in metadata.items()}


def _entry(name: str, value: Mapping[str, Any], offset: int) -> Entry:
    start, stop = value["data_offsets"]
    shape = tuple(value["shape"])
    if value["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"{name!r} has the unknown type {value['dtype']!r}")
    if any(type(n) is not int or not 0 <= n <= _MOST_VALUES for n in (start, stop, *shape)):
        raise ValueError(f"{name!r} has a shape or a place that has no meaning")
    entry = Entry(name, value["dtype"], shape, offset + start)
    if stop - start != entry.num_bytes:
        raise ValueError(f"{name!r} takes {stop - start:,} bytes and needs {entry.num_bytes:,}")
    return entry


def _place(entry: Entry) -> tuple[int, int]:
    return entry.start, entry.num_bytes


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the header names a tensor twice")
    return found
