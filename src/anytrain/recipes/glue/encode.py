"""Tokenize rows once, keep them in flat arrays, and pad them batch by batch.

Padding is the collator's: rows of 128 places would take several times the memory, and the
batches come out the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from anytrain.core.errors import BadInput, Notice
from anytrain.recipes.glue.labels import Labels, columns_of, texts_of
from anytrain.recipes.glue.table import Table
from anytrain.recipes.glue.tasks import Task

_ROWS_AT_ONCE = 4096
_FILL = {"attention_mask": 0, "special_tokens_mask": 1}


class Encoded(Dataset[dict[str, Any]]):
    """Tokenized rows: each column is one array of numbers and where its rows begin."""

    def __init__(self, columns: Mapping[str, Sequence[Sequence[int]]], labels: Any = None) -> None:
        self._flat: dict[str, np.ndarray[Any, Any]] = {}
        self._begins: dict[str, np.ndarray[Any, Any]] = {}
        for name, rows in columns.items():
            self._begins[name] = np.cumsum([0, *map(len, rows)])
            self._flat[name] = np.fromiter((n for row in rows for n in row), dtype=np.int32)
            self._num_rows = len(rows)
        self.labels = labels

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(self._num_rows)[index]
        row: dict[str, Any] = {
            name: self._flat[name][begins[index] : begins[index + 1]]
            for name, begins in self._begins.items()
        }
        if self.labels is not None:
            row["label"] = self.labels[index]
        return row


@dataclass(frozen=True, slots=True)
class Pad:
    """Make a batch of rows: as long as the longest, or as `length` where that is given."""

    token: int
    segment: int = 0
    left: bool = False
    length: int | None = None
    multiple: int = 1

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the rows as tensors, with `labels` where the rows have a label."""
        fill = {"input_ids": self.token, "token_type_ids": self.segment, **_FILL}
        batch: dict[str, torch.Tensor] = {}
        for name in rows[0]:
            if name == "label":
                batch["labels"] = torch.tensor([row["label"] for row in rows])
                continue
            longest = self.length or max(len(row[name]) for row in rows)
            width = -(-longest // self.multiple) * self.multiple
            padded = np.full((len(rows), width), fill.get(name, 0), dtype=np.int64)
            for place, row in zip(padded, rows, strict=True):
                count = len(row[name])
                place[slice(width - count, width) if self.left else slice(count)] = row[name]
            batch[name] = torch.from_numpy(padded)
        return batch


def encode(
    table: Table, task: Task | None, labels: Labels | None, tokenizer: Any, max_length: int
) -> Encoded:
    """Return the table's rows as numbers; without `labels` they are not looked at."""
    columns = columns_of(table, task)
    texts = [texts_of(table, name) for name in (columns.first, columns.second) if name]
    numbers = None
    if labels is not None and columns.label is not None:
        numbers = labels.numbers(table.columns[columns.label], table.origin)
    found: dict[str, list[Sequence[int]]] = {}
    for begin in range(0, len(table), _ROWS_AT_ONCE):
        part = [text[begin : begin + _ROWS_AT_ONCE] for text in texts]
        for name, rows in tokenizer(*part, truncation=True, max_length=max_length).items():
            found.setdefault(name, []).extend(rows)
    return Encoded(found, numbers)


def fitting_length(asked: int, tokenizer: Any, config: Any, *, pairs: bool) -> int:
    """Return how long rows may get: what was asked for, or what the model can read."""
    places = getattr(config, "max_position_embeddings", None)
    limits = [tokenizer.model_max_length, *([places] if isinstance(places, int) else [])]
    limit = min(limits)
    needed = tokenizer.num_special_tokens_to_add(pair=pairs) + (2 if pairs else 1)
    if asked < needed:
        raise BadInput(
            f"Cannot use --max_seq_length {asked}.",
            why=f"this tokenizer needs at least {needed} places for "
            f"{'a pair' if pairs else 'a sentence'}.",
            fix="pass --max_seq_length 128, or the length of your texts.",
        )
    if asked > limit:
        warnings.warn(
            f"--max_seq_length {asked} is more than the {limit} places this model has: "
            f"{limit} are used.",
            Notice,
            stacklevel=2,
        )
    return int(min(asked, limit))
