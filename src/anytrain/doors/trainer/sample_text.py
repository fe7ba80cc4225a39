"""A sample's inputs as a person reads them.

INVARIANT: no row is asked for that does not lie in memory already. To read one runs the user's
code, in a process it may not expect: it may move generators, share a file with the workers, or
take its time. Known are lists, tuples and columns of rows, tensors, tables of `datasets` (without
what they would make of a row), and parts of these. Any other data set may offer
`in_words(index)`, which returns texts by name.

The texts of a row are shown, else its tokens decoded, else what kind of numbers it holds.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from anytrain.engine.data.columns import Table, as_rows
from anytrain.engine.data.seeded import hold, put_back, seed_all

LONGEST = 500
"""The characters that are shown of one text."""
_MOST_COLUMNS = 8
_MOST_VALUES = 6
_MOST_SECONDS = 2.0
_HELD = (list, tuple, np.ndarray, torch.Tensor)
_LABELS = ("label", "labels", "label_ids")
_NO_INPUTS = (*_LABELS, "attention_mask", "token_type_ids", "special_tokens_mask")


@dataclass(frozen=True, slots=True)
class Looked:
    """A row that was looked up, and its inputs in words."""

    row: Any
    inputs: dict[str, str]


def look_up(dataset: Any, places: Iterable[int | None], tokenizer: Any = None) -> dict[int, Looked]:
    """Return some samples by their indices; none of a data set whose rows are not at hand.

    A slow `in_words` gives those that came in time. Nothing that it draws moves the process's own
    generators.
    """
    at = _at_hand(as_rows(dataset) if type(dataset) is dict else dataset, tokenizer)
    if at is None:
        return {}
    found: dict[int, Looked] = {}
    before, late = hold(), time.monotonic() + _MOST_SECONDS
    try:
        seed_all(0)
        for place in places:
            if place is not None and place >= 0 and time.monotonic() < late:
                found[place] = at(place)
    finally:
        put_back(before)
    return found


def _at_hand(dataset: Any, tokenizer: Any) -> Callable[[int], Looked] | None:
    """Return what gives a data set's samples from memory, or from its own words; None: nothing."""
    own = getattr(dataset, "in_words", None)
    if callable(own):
        return lambda place: Looked(None, {str(n): _cut(str(t)) for n, t in own(place).items()})
    if type(dataset) is Subset:
        inner, places = _at_hand(dataset.dataset, tokenizer), dataset.indices
        return None if inner is None else lambda place: inner(int(places[place]))
    if type(dataset) is ConcatDataset:
        return _of_several(dataset, tokenizer)
    row = _row_of(dataset)
    if row is None:
        return None
    return lambda place: Looked(found := row(place), in_words(found, tokenizer))


def _of_several(dataset: ConcatDataset[Any], tokenizer: Any) -> Callable[[int], Looked] | None:
    parts = [_at_hand(part, tokenizer) for part in dataset.datasets]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    starts = [0, *dataset.cumulative_sizes]

    def at(place: int) -> Looked:
        part = bisect_right(starts, place) - 1
        return known[part](place - starts[part])

    return at


def _row_of(dataset: Any) -> Callable[[int], Any] | None:
    """Return what gives a row that lies in memory. A class of somebody's own may do anything."""
    if type(dataset) in (list, tuple):
        return lambda place: dataset[place]
    if type(dataset) is Table:
        held = dataset.columns.values()
        is_plain = all(type(column) in _HELD for column in held)
        return (lambda place: dataset[place]) if is_plain else None
    if type(dataset) is TensorDataset:
        is_plain = all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
        return (lambda place: dataset[place]) if is_plain else None
    tables = sys.modules.get("datasets")
    if tables is not None and type(dataset) is tables.Dataset:
        return lambda place: _arrow_row(dataset, place)
    return None


def _arrow_row(table: Any, place: int) -> Any:
    """Return a row as it is stored: neither a format, nor a transform, nor a decoder runs."""
    from datasets.formatting import query_table

    return query_table(table.data, place, indices=table._indices).to_pylist()[0]


def in_words(row: Any, tokenizer: Any = None) -> dict[str, str]:
    """Return the inputs of one row as texts by name.

    >>> in_words({"text": "<b>good</b>", "input_ids": [3, 4], "label": 1})
    {'text': '<b>good</b>'}
    >>> in_words({"x": [0.5, 1.5, 2.5], "labels": 1})
    {'x': '3 numbers: 0.5, 1.5, 2.5'}
    """
    if isinstance(row, (list, tuple)):  # the last of a tuple is its label
        row = {str(place): value for place, value in enumerate(row[:-1] or row)}
    if not isinstance(row, Mapping):
        return {"input": _value(row)}
    texts = {name: text for name, value in row.items() if (text := _text(value)) is not None}
    if texts:
        return _first_columns(texts)
    tokens = row.get("input_ids")
    if tokens is not None and callable(getattr(tokenizer, "decode", None)):
        said = tokenizer.decode(_listed(tokens), skip_special_tokens=True)
        return {"text": _cut(str(said).strip())}
    others = {name: value for name, value in row.items() if name not in _NO_INPUTS}
    return _first_columns({name: _value(value) for name, value in others.items()})


def token(row: Any, place: int, tokenizer: Any) -> str | None:
    """Return one token of a row in words; None where nobody can tell which it is."""
    tokens = row.get("input_ids") if isinstance(row, Mapping) else None
    if tokens is None or not callable(getattr(tokenizer, "decode", None)):
        return None
    known = _listed(tokens)
    is_there = place < len(known) and getattr(tokenizer, "padding_side", "right") == "right"
    return _cut(str(tokenizer.decode([known[place]])).strip()) if is_there else None


def label_of(row: Any) -> Any:
    """Return a row's label; None where it has none."""
    if isinstance(row, Mapping):
        return next((row[name] for name in _LABELS if name in row), None)
    return row[-1] if isinstance(row, (list, tuple)) and len(row) > 1 else None


def _first_columns(columns: Mapping[Any, str]) -> dict[str, str]:
    return {str(name): _cut(text) for name, text in islice(columns.items(), _MOST_COLUMNS)}


def _text(value: Any) -> str | None:
    """Return a text, or words in a row; None where it is something else."""
    if isinstance(value, str):
        return value
    words = isinstance(value, (list, tuple)) and value and all(isinstance(v, str) for v in value)
    return " ".join(value) if words else None


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _listed(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _value(value: Any) -> str:
    """Return what a value is: a number, or the shape of many and the first of them."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if not isinstance(value, (*_HELD, np.generic, bool, int, float)):
        # A picture, for example, would be read from its file.
        return _cut(f"{type(value).__name__} {getattr(value, 'size', '')}".strip())
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError):
        return type(value).__name__
    if numbers.dtype.kind not in "biuf":
        return type(value).__name__
    first = ", ".join(f"{number:.4g}" for number in numbers.reshape(-1)[:_MOST_VALUES].tolist())
    if numbers.ndim == 0:
        return first
    many = f"{len(numbers)} numbers" if numbers.ndim == 1 else " × ".join(map(str, numbers.shape))
    return f"{many}: {first}{', …' if numbers.size > _MOST_VALUES else ''}"
