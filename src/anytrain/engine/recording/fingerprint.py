"""Tell data sets apart without reading them: kind, length, columns, and a hash of some rows.

INVARIANT: no row is asked for, and no code of the user's runs but `len`: neither a random draw
nor a slow row is touched. What is hashed lies in memory already: some rows of lists, tensors and
arrays, and what a data set's attributes hold of these. Other values count by their type.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import getattr_static
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

_MOST_ROWS = 32
_MOST_VALUES = 4_096
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 6


def describe(dataset: Any) -> dict[str, Any]:
    """Return kind, number of rows, columns and fingerprint of a data set; None where unknown."""
    kind = type(dataset)
    found: dict[str, Any] = {
        "kind": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    }
    looks = {"num_rows": len, "columns": _columns, "fingerprint": _fingerprint}
    for name, look in looks.items():
        found[name] = None
        with suppress(Exception):  # somebody's own class may do anything
            found[name] = look(dataset)
    return found


def _fingerprint(dataset: Any) -> str | None:
    own = getattr_static(dataset, "_fingerprint", None)
    if isinstance(own, str):  # datasets.Dataset keeps one of every change to it
        return own
    if isinstance(dataset, IterableDataset):
        return None
    sample = _Sample()
    sample.add(dataset, 0)
    return sample.hex()


class _Sample:
    """A hash over a bounded part of nested values."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._room, self._num_left = _MOST_BYTES, _MOST_VALUES
        self._has_content = False

    def hex(self) -> str | None:
        """Return the hash; None where only types were seen."""
        return self._hash.hexdigest()[:16] if self._has_content else None

    def add(self, value: Any, depth: int) -> None:
        """Add a value: its type, and as much of what it holds as there is room for."""
        self._num_left -= 1
        if min(self._num_left, self._room) <= 0 or depth > _MOST_DEPTH:
            return
        self._mark(type(value).__name__)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self._plain(value)
        elif isinstance(value, torch.Tensor | np.ndarray | np.generic):
            self._array(value)
        elif isinstance(value, dict):
            self._pairs(value, depth)
        elif type(value) in (list, tuple, range):
            self._rows(value, depth)
        elif depth == 0 or isinstance(value, Dataset):
            self._held(value, depth)

    def _held(self, dataset: Any, depth: int) -> None:
        """Add what a data set holds: its own fingerprint where it keeps one, or its attributes."""
        own = getattr_static(dataset, "_fingerprint", None)
        if isinstance(own, str):
            self._plain(own)
        else:
            self._pairs(getattr(dataset, "__dict__", {}), depth)

    def _pairs(self, values: Mapping[Any, Any], depth: int) -> None:
        self._mark(f"{len(values)}")
        for name, inner in islice(values.items(), _MOST_VALUES):
            self._mark(str(name))
            self.add(inner, depth + 1)

    def _rows(self, rows: Sequence[Any], depth: int) -> None:
        self._plain(len(rows))
        for index in _some(len(rows)):
            self.add(rows[index], depth + 1)

    def _plain(self, value: Any) -> None:
        data = value if isinstance(value, bytes) else str(value).encode(errors="replace")
        self._content(struct.pack("<q", len(data)) + data[:_MOST_BYTES])

    def _array(self, value: Any) -> None:
        self._mark(f"{value.dtype} {tuple(value.shape)}")
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.layout != torch.strided:
                return  # to read it would wait for the device
            try:
                flat = value.detach().numpy()
            except (TypeError, RuntimeError):  # a dtype that numpy does not know
                return
        else:
            flat = np.asarray(value)
        if flat.dtype.hasobject:
            return
        rows = flat if flat.ndim else flat.reshape(1)
        for index in _some(len(rows)):
            row = rows[index].reshape(-1)
            self._content(np.ascontiguousarray(row[: _MOST_BYTES // 16]).tobytes())

    def _content(self, data: bytes) -> None:
        self._hash.update(data[: max(self._room, 0)])
        self._room -= len(data)
        self._has_content = True

    def _mark(self, text: str) -> None:
        self._hash.update(f"<{text}>".encode(errors="backslashreplace"))


def _some(length: int) -> list[int]:
    """Return the first, the last and some indices between."""
    if length <= _MOST_ROWS:
        return list(range(length))
    return sorted({round(i * (length - 1) / (_MOST_ROWS - 1)) for i in range(_MOST_ROWS)})


def _columns(dataset: Any) -> list[str] | None:
    named = dataset[0] if type(dataset) is list and dataset else dataset
    if isinstance(named, Mapping):
        return [str(name) for name in named]
    for attribute in ("column_names", "columns"):
        found = getattr_static(dataset, attribute, None)
        if isinstance(found, property) and type(dataset).__module__.startswith("datasets."):
            found = getattr(dataset, attribute)  # a property of somebody's own may read files
        if isinstance(found, list | tuple | Mapping | np.ndarray) and len(found):
            return [str(name) for name in found]
    return None
