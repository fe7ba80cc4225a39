"""A dict of columns as a data set: its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset

from anytrain.core.errors import BadInput


class Table(Dataset[dict[str, Any]]):
    """The rows of columns that are given by name.

    >>> rows = Table({"x": [1, 2, 3], "labels": [0, 1, 0]})
    >>> len(rows), rows[1]
    (3, {'x': 2, 'labels': 1})
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = dict(columns)
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise BadInput(
                "Cannot make rows of these columns.",
                why=f"they must be equally long: {told}." if lengths else "there is none.",
                fix="give every sample a value in each column.",
            )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


def as_rows(dataset: Any) -> Any:
    """Return what can be asked for a row: a dict of columns as a `Table`, all else as it is."""
    return Table(dataset) if isinstance(dataset, dict) else dataset
