"""Columns of equal length, held in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """Columns by name, and where they came from; rows keep the order of the file."""

    columns: Mapping[str, Sequence[Any]]
    origin: str
    label_names: tuple[str, ...] = ()
    """The names of whole-number labels, where the source tells them."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def first(self, count: int | None) -> Table:
        """Return the first `count` rows, or all where there are fewer or none is asked for."""
        if count is None or count >= len(self):
            return self
        kept = {name: column[:count] for name, column in self.columns.items()}
        return Table(kept, self.origin, self.label_names)
