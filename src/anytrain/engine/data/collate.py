"""Make a batch of samples that are alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from anytrain.core.errors import BadInput
from anytrain.core.text import one_line

_LABELS = ("label", "label_ids")
_NUMBERS = (int, float, bool)
_MOST_SHOWN = 8
_MOST_TEXT = 40


def collate(features: Sequence[Any]) -> Any:
    """Return the samples' values stacked: a dict of tensors for dicts and objects with fields.

    `label` (one value a sample) and `label_ids` become `labels`: long for integers, else float.
    Texts and None are left out, as the first sample has them. Tuples, tensors and numbers are
    stacked as torch's own collating does.

    >>> collate([{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}])["labels"]
    tensor([0, 1])
    """
    _check(features)
    rows = _as_dicts(features)
    if rows is None:
        return default_collate(list(features))
    first = rows[0]
    batch: dict[str, Tensor] = {}
    if first.get("label") is not None:
        batch["labels"] = _filled("label", _labels, rows)
    elif first.get("label_ids") is not None:
        batch["labels"] = _filled("label_ids", _label_ids, rows)
    for key, value in first.items():
        if key not in _LABELS and value is not None and not isinstance(value, str):
            batch[key] = _filled(key, stack, rows)
    return batch


def obstacle(features: Sequence[Any]) -> str | None:
    """Say in a sentence which column keeps samples from being a batch; None where none does."""
    first = features[0]
    for key, value in first.items() if isinstance(first, Mapping) else ():
        if value is None:  # torch's own collating does not leave it out
            return f"Cannot collate {key!r}: number 1 of the batch's samples has None there."
    try:
        collate(features)
    except BadInput as error:
        return str(error).partition("\n")[0]
    return None


def _check(features: Sequence[Any]) -> None:
    """Refuse no samples, and samples that are none."""
    if not features:
        raise BadInput(
            "Cannot make a batch of no samples.",
            why="the list of samples is empty.",
            fix="look at the sampler: each of its batches needs an index.",
        )
    for place, feature in enumerate(features):
        if feature is None:
            raise BadInput(
                f"Cannot collate: number {place + 1} of the batch's {len(features)} samples "
                "is None.",
                why="the data set returned None for it; a __getitem__ without a return does.",
                fix="let the data set return a sample for each index, leave out beforehand those "
                "that it cannot give, or pass a data_collator that does.",
            )


def _as_dicts(features: Sequence[Any]) -> Sequence[Mapping[str, Any]] | None:
    """Return the samples as dicts; None where they are what torch stacks by itself."""
    first = features[0]
    if isinstance(first, Mapping):
        return features
    if isinstance(
        first, Tensor | np.ndarray | np.generic | tuple | list | str | bytes | int | float
    ):
        return None
    if dataclasses.is_dataclass(first):  # its fields, also where it has slots
        names = [field.name for field in dataclasses.fields(first)]
        return [{name: getattr(feature, name) for name in names} for feature in features]
    return [vars(feature) for feature in features] if hasattr(first, "__dict__") else None


def _filled(
    key: str, make: Callable[[list[Any]], Tensor], rows: Sequence[Mapping[str, Any]]
) -> Tensor:
    """Return one key's values as a tensor, or say what keeps them from being one."""
    try:
        values = [row[key] for row in rows]
    except KeyError as error:
        lacking = next(i for i, row in enumerate(rows) if key not in row)
        raise BadInput(
            f"Cannot collate {key!r}: number {lacking + 1} of the batch's samples does not "
            "have it.",
            why="the first sample does, and a batch needs it of each.",
            fix=f"give every sample {key!r}, or none.",
        ) from error
    except TypeError as error:
        _refuse_odd(key, rows, error)
    try:
        return make(values)
    except (ValueError, TypeError, RuntimeError) as error:
        _refuse(key, values, error)


def stack(values: list[Any]) -> Tensor:
    """Return a list of tensors, arrays, numbers or (nested) lists of numbers as one tensor."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(values)
    if isinstance(first, np.ndarray):
        return torch.from_numpy(np.stack(values))
    inmost = first
    while isinstance(inmost, list | tuple) and inmost:
        inmost = inmost[0]
    if isinstance(inmost, np.ndarray):
        return torch.from_numpy(np.array(values))
    return _of_lists(values) if type(inmost) in _NUMBERS else torch.tensor(values)


def _of_lists(values: list[Any]) -> Tensor:
    """Return what torch.tensor does, by way of numpy, which reads lists four times as fast."""
    array = np.array(values)
    if array.dtype == np.int64 or array.dtype == np.bool_:
        return torch.from_numpy(array)
    if array.dtype == np.float64:
        return torch.from_numpy(array).to(torch.get_default_dtype())
    return torch.tensor(values)


def _labels(values: list[Any]) -> Tensor:
    first = values[0]
    if isinstance(first, Tensor) and first.numel() != 1:
        return torch.stack(values)
    if isinstance(first, np.ndarray):
        return torch.from_numpy(np.stack(values)).to(
            torch.float if first.ndim else _kind(first[()])
        )
    return torch.tensor(values, dtype=_kind(first.item() if isinstance(first, Tensor) else first))


def _label_ids(values: list[Any]) -> Tensor:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(values)
    kind = _kind(first[0]) if len(first) else torch.long
    if isinstance(first, np.ndarray):
        return torch.from_numpy(np.stack(values)).to(kind)
    return stack(values).to(kind)


def _kind(value: Any) -> torch.dtype:
    return torch.long if isinstance(value, int | np.integer) else torch.float


def _refuse_odd(key: str, rows: Sequence[Any], error: TypeError) -> NoReturn:
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BadInput(
                f"Cannot collate {key!r}: number {place + 1} of the batch's samples is no dict "
                f"but of type {type(row).__name__}.",
                why="the first sample is one, and the samples of a batch are alike.",
                fix="let the data set return samples of one kind.",
            ) from error
    raise error


def _refuse(key: str, values: list[Any], error: Exception) -> NoReturn:
    """Raise the error that says which rows do not fit."""
    for place, value in enumerate(values):
        if value is None or isinstance(value, str):  # the first is neither
            raise BadInput(
                f"Cannot collate {key!r}: number {place + 1} of the batch's samples has "
                f"{one_line(repr(value), most=_MOST_TEXT)} there.",
                why=f"the first sample has a value of type {type(values[0]).__name__}."
                if place
                else "a batch holds numbers.",
                fix=f"give every sample a number (or numbers) for {key!r}, or none.",
            ) from error
    lengths = _lengths(values)
    if len(set(lengths)) > 1:
        shown = ", ".join(map(str, lengths[:_MOST_SHOWN]))
        more = ", ..." if len(lengths) > _MOST_SHOWN else ""
        raise BadInput(
            f"Cannot collate {key!r}: its rows have different lengths ({shown}{more}).",
            why="a tensor has rows of one length, and nothing here pads them.",
            fix="pass a tokenizer (processing_class=) or DataCollatorWithPadding to pad each "
            "batch, or pad the data to one length (pad_to_max_length, padding='max_length').",
        ) from error
    raise BadInput(
        f"Cannot collate {key!r}: {type(values[0]).__name__} values make no tensor ({error}).",
        why="a batch holds numbers, lists of numbers, arrays and tensors of one shape.",
        fix=f"convert {key!r} in the dataset, remove it, or pass a data_collator of your own.",
    ) from error


def _lengths(values: list[Any]) -> list[Any]:
    """Return each row's length, or shape where it is an array."""
    if any(isinstance(value, Tensor | np.ndarray) and value.ndim != 1 for value in values):
        return [tuple(np.shape(value)) for value in values]
    return [len(value) if hasattr(value, "__len__") else 1 for value in values]
