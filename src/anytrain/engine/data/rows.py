"""Rows of a data set that nobody has taken apart yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, overload


class Rows(Sequence[dict[str, Any]]):
    """The samples of a batch: dicts where one is looked at, and the data set's columns until then.

    A data set returns it from `__getitems__`. A collator that knows the data set makes its batch
    of whole columns; to every other one it is a list of dicts.
    """

    __slots__ = ("names", "numbers", "source")

    def __init__(self, source: Any, numbers: Sequence[int], names: Collection[str]) -> None:
        self.source = source
        self.numbers = numbers
        self.names = names

    def only(self, keep: Collection[str]) -> Rows:
        """Return the same samples with the columns that are kept."""
        return Rows(self.source, self.numbers, [name for name in self.names if name in keep])

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, place: slice) -> Rows: ...

    def __getitem__(self, place: int | slice) -> dict[str, Any] | Rows:
        if isinstance(place, slice):
            return Rows(self.source, self.numbers[place], self.names)
        row = self.source[self.numbers[place]]
        return {name: row[name] for name in self.names}
