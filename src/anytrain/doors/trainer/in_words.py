"""A sample's inputs as a person reads them.

A data set may do it itself, with `in_words(index)` that returns texts by name. Otherwise the texts
of a row are shown, else its tokens decoded, else what kind of numbers it holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from anytrain.doors.trainer.outputs import has_length
from anytrain.engine.data.seeded import hold, put_back, seed_all
from anytrain.engine.data.table import as_rows

LONGEST = 500
"""The characters that are shown of one text."""
_MOST_COLUMNS = 8
_MOST_VALUES = 6
_MOST_SECONDS = 2.0
_LABELS = ("label", "labels", "label_ids")
_NO_INPUTS = (*_LABELS, "attention_mask", "token_type_ids", "special_tokens_mask")


@dataclass(frozen=True, slots=True)
class Looked:
    """A row that was looked up, and its inputs in words."""

    row: Any
    inputs: dict[str, str]


def look_up(dataset: Any, places: Iterable[int | None], tokenizer: Any = None) -> dict[int, Looked]:
    """Return some samples by their indices.

    A data set that cannot be asked for a row gives none, a slow one those that came in time.
    Nothing that is drawn while a row is read moves the process's own generators.
    """
    dataset = as_rows(dataset)
    if isinstance(dataset, IterableDataset) or not _can_be_asked(dataset):
        return {}
    found: dict[int, Looked] = {}
    before, late = hold(), time.monotonic() + _MOST_SECONDS
    try:
        seed_all(0)
        for place in places:
            if place is not None and 0 <= place < len(dataset) and time.monotonic() < late:
                found[place] = _sample(dataset, place, tokenizer)
    finally:
        put_back(before)
    return found


def _can_be_asked(dataset: Any) -> bool:
    return has_length(dataset) and hasattr(dataset, "__getitem__")


def _sample(dataset: Any, place: int, tokenizer: Any) -> Looked:
    row, own = dataset[place], getattr(dataset, "in_words", None)
    if callable(own):
        return Looked(row, {str(name): _cut(str(text)) for name, text in own(place).items()})
    return Looked(row, in_words(row, tokenizer))


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
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError):
        return type(value).__name__
    if numbers.dtype.kind not in "biuf":
        return _cut(f"{type(value).__name__} {getattr(value, 'size', '')}".strip())
    first = ", ".join(f"{number:.4g}" for number in numbers.reshape(-1)[:_MOST_VALUES].tolist())
    if numbers.ndim == 0:
        return first
    many = f"{len(numbers)} numbers" if numbers.ndim == 1 else " × ".join(map(str, numbers.shape))
    return f"{many}: {first}{', …' if numbers.size > _MOST_VALUES else ''}"
