"""Tell data sets apart by what their samples are: kind, length, columns, and a hash of some.

INVARIANT: no code of the user's runs but `len`: neither a random draw nor a slow row is touched.
What is hashed lies in memory or in a file's map already: some rows of lists, tensors, arrays and
tables of `datasets`, and of a data set of one's own what its `__getitem__` names of these. Where
rows came from (a cache, a file's time, the library's own fingerprint) is no part of it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from inspect import getattr_static
from itertools import islice
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from anytrain.core import bytecode

_MOST_ROWS = 32
_STRETCH = 64
"""So many values in a row are taken of an array that has one dimension."""
_MOST_VALUES = 4_096
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 6
_MOST_FUNCTIONS = 100
_READS = ("__len__", "__getitem__", "__getitems__", "__getattr__")
_ANY_NAME = frozenset({"getattr", "vars", "__dict__", "attrgetter", "__getattribute__"})


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
    if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__"):
        return None  # a stream
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
        # An array that lies in a file is of another class, and the same content.
        self._mark("ndarray" if isinstance(value, np.ndarray) else type(value).__name__)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self._plain(value)
        elif isinstance(value, torch.Tensor | np.ndarray | np.generic):
            self._array(value)
        elif isinstance(value, dict):
            self._pairs(value, depth)
        elif type(value) in (list, tuple, range):
            self._rows(value, depth)
        elif _is_table(value):
            self._table(value, depth)
        elif depth == 0 or isinstance(value, Dataset):
            self._pairs(_held(value), depth)

    def _pairs(self, values: Mapping[Any, Any], depth: int) -> None:
        self._mark(f"{len(values)}")
        first = islice(values.items(), _MOST_VALUES)  # to sort a million takes its time
        for name, inner in sorted(first, key=lambda pair: str(pair[0])):
            self._mark(str(name))
            self.add(inner, depth + 1)

    def _rows(self, rows: Sequence[Any], depth: int) -> None:
        self._plain(len(rows))
        for index in _some(len(rows)):
            self.add(rows[index], depth + 1)

    def _table(self, table: Any, depth: int) -> None:
        """Add rows of a table of `datasets` as they are stored: nothing is decoded."""
        from datasets.formatting import query_table

        self._plain(len(table))
        names = sorted(table.format["columns"] or table.column_names)
        for index in _some(len(table)):
            row = query_table(table._data, index, table._indices)
            for name in names:
                self._mark(name)
                self._arrow(row.column(name).combine_chunks(), depth + 1)

    def _arrow(self, values: Any, depth: int) -> None:
        """Add a column's values; a long list becomes an array, and no object for each number."""
        import pyarrow as pa

        kind = getattr(values.type, "storage_type", values.type)
        values = getattr(values, "storage", values)
        if depth > _MOST_DEPTH:
            return
        if pa.types.is_struct(kind):
            for inner in values.flatten():
                self._arrow(inner, depth + 1)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            self._array(values.value_lengths().to_numpy(zero_copy_only=False))
            self._arrow(values.flatten(), depth + 1)
        elif pa.types.is_primitive(kind):
            self._array(values.to_numpy(zero_copy_only=False))
        else:
            self.add(values[:_STRETCH].to_pylist(), depth)

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
        long = _STRETCH if rows.ndim == 1 else 1
        for index in _some(len(rows)):
            row = rows[index : index + long].reshape(-1)
            self._content(np.ascontiguousarray(row[: _MOST_BYTES // 16]).tobytes())

    def _content(self, data: bytes) -> None:
        self._hash.update(data[: max(self._room, 0)])
        self._room -= len(data)
        self._has_content = True

    def _mark(self, text: str) -> None:
        self._hash.update(f"<{text}>".encode(errors="backslashreplace"))


def _is_table(value: Any) -> bool:
    """Whether it is a data set of the library `datasets`, which is not imported for it."""
    return any(kind.__module__ == "datasets.arrow_dataset" for kind in type(value).__mro__)


def _held(dataset: Any) -> dict[str, Any]:
    """Return the attributes of a data set that its samples are made of, as far as code tells."""
    held: dict[str, Any] = getattr(dataset, "__dict__", {})
    names = _names_read(type(dataset))
    if names is None:
        return held
    return {name: value for name, value in held.items() if name in names}


def _names_read(kind: type) -> frozenset[str] | None:
    """Return every name in the code that gives a row; None where it could read any attribute."""
    found: set[str] = set()
    waiting: list[Any] = [each for name in _READS for each in _defined(kind, name)]
    seen: set[Any] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or len(seen) > _MOST_FUNCTIONS:
            return None  # not written in Python, wrapped in something, or no end of it
        if function in seen:
            continue
        seen.add(function)
        names = bytecode.names(function)
        found |= names
        for name in names:
            waiting += _defined(kind, name)
            waiting += _ours(function.__globals__.get(name))
        waiting += [f for value in bytecode.enclosed(function).values() for f in _ours(value)]
    return None if found & _ANY_NAME else frozenset(found)


def _defined(kind: type, name: str) -> list[Any]:
    """Return the functions that a class and those it inherits from have under a name."""
    found = []
    for each in kind.__mro__:
        value = vars(each).get(name)
        value = getattr(value, "__func__", value)
        if isinstance(value, property | cached_property):
            value = value.fget if isinstance(value, property) else value.func
        if callable(value) and each not in (object, Dataset):
            found.append(value)
    return found


def _ours(value: Any) -> list[Any]:
    """Return a function that may be handed the data set; a library's reads none of its names."""
    is_library = getattr(value, "__module__", None) or ""
    if isinstance(value, FunctionType) and is_library.split(".")[0] not in ("torch", "numpy"):
        return [value]
    return []


def _some(length: int) -> list[int]:
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
