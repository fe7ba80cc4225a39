"""Tell what another process surely loads just as this one does.

A worker begins as a copy of this process: it shares its open files and connections, and learns
nothing of what changes here later. Data sets and collators that hold nothing of that kind are
known by name, or say `loads_alike = True` in their own class; no others are taken for such.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate

from anytrain.engine.data.collate import collate as stacked
from anytrain.engine.data.columns import DropColumns
from anytrain.engine.data.masks import WithoutFullMask
from anytrain.engine.data.packing import Packed
from anytrain.engine.data.padding import ToBuckets
from anytrain.engine.data.seeded import SeededCollate, SeededDataset

_HOLDS: dict[type, str] = {
    Subset: "dataset",
    SeededDataset: "dataset",
    **dict.fromkeys((SeededCollate, DropColumns, ToBuckets, Packed, WithoutFullMask), "collate"),
}
"""What only passes on what something else loads, and the name it has that under."""
_ARROW, _COLLATORS = "datasets.arrow_dataset", "transformers.data.data_collator"
_ARROW_FORMATS = (None, "numpy", "torch")  # any other may be a function of the user's
_NOTHING = object()


def unlike(loader: DataLoader[Any]) -> str | None:
    """Return the name of what may load something else in another process; None where nothing."""
    for part in _parts(loader):
        if not _is_known(part):
            return str(getattr(part, "__qualname__", type(part).__qualname__))
    return None


class Changes:
    """Notices that something which loads was changed since its copies were made."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._before = [(part, dict(_attributes(part))) for part in _parts(loader)]

    def changed(self) -> str | None:
        """Return the name of what was given another attribute; None where nothing was."""
        for part, before in self._before:
            now = _attributes(part)
            same = all(now.get(name, _NOTHING) is value for name, value in before.items())
            if not same or len(now) != len(before):
                return type(part).__qualname__
        return None


def _attributes(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(part, "__dict__", {})
    return found


def _parts(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield everything that takes part in making a batch."""
    yield from _with_held(loader.dataset)
    yield from _with_held(loader.collate_fn)


def _with_held(part: Any) -> Iterator[Any]:
    yield part
    if type(part) is ConcatDataset:
        for each in part.datasets:
            yield from _with_held(each)
    elif type(part) in _HOLDS:
        yield from _with_held(getattr(part, _HOLDS[type(part)]))


def _is_known(part: Any) -> bool:
    kind = type(part)
    if kind in _HOLDS or kind is ConcatDataset or part is default_collate or part is stacked:
        return True
    if kind.__module__ == _ARROW:  # its rows are mapped into memory, and never change
        return part.format["type"] in _ARROW_FORMATS
    # A subclass may do anything: what its parent says of itself is not said of it.
    return vars(kind).get("loads_alike") is True or _is_transformers(part)


def _is_transformers(collate: Any) -> bool:
    """Whether it is a collator of that library, which holds nothing from elsewhere."""
    if getattr(collate, "__module__", None) != _COLLATORS:
        return False
    if isinstance(collate, FunctionType):
        return True
    homes = (getattr(value, "__module__", None) for value in _attributes(collate).values())
    return all(home is None or home.split(".")[0] == "transformers" for home in homes)
