"""Cut the columns of a batch that every row masks, where nothing reads them.

A data set that was padded to its longest text computes padding for most of its time. How much of a
batch is padding is told on the host, before it goes to the device; it is cut as it is handed out,
to one of a few lengths.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from anytrain.engine.objective import IGNORED

MASK = "attention_mask"
_LEVELS = 8
"""How many lengths there are: eighths of the whole."""
_EVEN = 8
"""Lengths are multiples of this."""
_TOLD_BY = 8
"""A trial needs an eighth of the columns, at least, to show that nothing reads them."""
Trial = Callable[[Any, Any], str | None]


class Columns(NamedTuple):
    """The columns of a batch that stay."""

    start: int
    stop: int
    width: int
    """How many there were."""


class PaddingTrim:
    """What cuts batches, once a trial has shown that the model does not read what is cut.

    The trial gets a batch whole and cut; it returns what differed, or None where nothing did.
    """

    def __init__(self, trial: Trial, tell: Callable[[str | None], None]) -> None:
        self._trial, self._tell = trial, tell
        self.cuts: bool | None = None
        """Whether batches are cut; None where that is not known yet."""

    def measure(self, batch: Any) -> Columns | None:
        """Return which columns of a batch on the host would stay; None where all would."""
        return None if self.cuts is False else used_columns(batch)

    def __call__(self, batch: Any, columns: Columns) -> Any:
        """Return the batch as the step gets it."""
        if self.cuts is False:
            return batch
        cut = cut_columns(batch, columns)
        if self.cuts is None:
            if (columns.stop - columns.start) * _TOLD_BY > columns.width * (_TOLD_BY - 1):
                return batch
            differs = self._trial(batch, cut)
            self.cuts = differs is None
            self._tell(differs)
        return cut if self.cuts else batch


def used_columns(batch: Any) -> Columns | None:
    """Return the columns that hold all that is not masked, as one of a few widths.

    None where nothing can be cut: there is no mask, no masked column, or something else is read of
    these columns, such as labels.

    >>> mask = torch.zeros(2, 64, dtype=torch.int64)
    >>> mask[:, :19] = 1
    >>> used_columns({"input_ids": mask + 4, "attention_mask": mask})
    Columns(start=0, stop=24, width=64)
    """
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.is_floating_point():
        return None
    if mask.device.type != "cpu" or mask.shape[1] < 2 * _EVEN:
        return None
    read = mask.ne(0).any(0)
    if bool(read[0]) and bool(read[-1]):
        return None
    places = read.nonzero()
    if not len(places):
        return None
    columns = _rounded(int(places[0]), int(places[-1]) + 1, mask.shape[1])
    if columns.stop - columns.start == columns.width or not _labels_allow(batch, mask, columns):
        return None
    return columns


def _rounded(first: int, last: int, width: int) -> Columns:
    """Widen the columns from `first` to before `last` to the next allowed width."""
    level = -(-width // _LEVELS)
    level += -level % _EVEN
    wanted = min(-(-(last - first) // level) * level, width)
    stop = min(first + wanted, width)
    return Columns(stop - wanted, stop, width)


def _labels_allow(batch: Mapping[str, Any], mask: torch.Tensor, columns: Columns) -> bool:
    """Whether no loss counts a label that would be cut."""
    for name, value in batch.items():
        if "label" not in name or not _is_by_column(value, mask.shape):
            continue
        outside = (value[:, : columns.start], value[:, columns.stop :])
        if value.is_floating_point() or not all(bool((x == IGNORED).all()) for x in outside):
            return False
    return True


def cut_columns(batch: Any, columns: Columns) -> Any:
    """Return the batch with these columns of all that has a value for each column."""
    shape = batch[MASK].shape
    cut = copy.copy(batch)
    for name, value in list(batch.items()):
        if _is_by_column(value, shape):
            cut[name] = value[:, columns.start : columns.stop].contiguous()
    return cut


def _is_by_column(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[:2] == shape
