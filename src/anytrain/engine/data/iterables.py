"""Batches that come from an iterable of the user's own, which is no `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


class Given(IterableDataset[Any]):
    """A stream of whole batches; its length and its epoch are those of the iterable."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, where the iterable wants to know."""
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)


def as_it_is(batch: Any) -> Any:
    """Return the batch: it was collated already."""
    return batch
