"""Cut a micro-batch into smaller ones, where the whole does not fit the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anytrain.core.errors import NothingFits
from anytrain.engine.tree import leaves, take_rows


def num_rows(batch: Any) -> int | None:
    """Return the length of the first tensor's first dimension; None where there is none.

    >>> num_rows({"lr": 0.1, "ids": torch.zeros(3, 7)})
    3
    """
    for leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0:
            return int(leaf.shape[0])
    return None


def split_rows(batch: Any, parts: int) -> list[Any]:
    """Return the batch in so many parts of consecutive rows; the last may be smaller.

    Tensors and lists with as many rows as the batch are cut; each part holds the rest whole.
    There are never more parts than rows, nor an empty one.

    >>> split_rows(torch.arange(5), 2)
    [tensor([0, 1, 2]), tensor([3, 4])]
    """
    rows = num_rows(batch)
    if rows is None or rows == 0 or parts <= 1:
        return [batch]
    each = -(-rows // min(parts, rows))
    return [
        take_rows(batch, slice(start, min(start + each, rows)), rows)
        for start in range(0, rows, each)
    ]


class Parts:
    """Into how many parts each micro-batch is cut; it only grows.

    >>> parts = Parts()
    >>> parts.more(rows=8), parts.more(rows=8), parts.number
    (2, 4, 4)
    """

    def __init__(self, number: int = 1) -> None:
        self.number = number

    def more(self, rows: int | None) -> int:
        """Double the number of parts of a batch of `rows` rows that did not fit."""
        if rows is None or self.number >= rows:
            held = "no rows that could be split" if rows is None else "one row at a time"
            raise NothingFits(
                f"The device's memory is full with {held}.",
                why="the model, its gradients and its optimizer state leave too little room for "
                "one sample.",
                fix="shorten the samples, use gradient checkpointing or bf16, or a smaller model "
                "or optimizer.",
            )
        self.number *= 2
        return self.number
