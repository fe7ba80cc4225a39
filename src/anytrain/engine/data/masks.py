"""Leave out attention masks that hide nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from anytrain.engine.data.grouped import quick_lengths

_MASK = "attention_mask"


class WithoutFullMask:
    """A collator's batches, without a mask where it hides nothing.

    Models take no mask for one of ones. They look whether it is, to take attention's quick path;
    inside a recording they cannot look, and would take the slow one.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        """Return the batch of these rows."""
        batch = self.collate(rows)
        mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
        if isinstance(mask, torch.Tensor) and mask.device.type == "cpu" and bool(mask.all()):
            return {name: value for name, value in batch.items() if name != _MASK}
        return batch


def are_even(dataset: Any) -> bool:
    """Whether all samples are known to be of one length, without reading them one by one."""
    lengths = quick_lengths(dataset)
    return lengths is not None and len(lengths) > 0 and min(lengths) == max(lengths)
