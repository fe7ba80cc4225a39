"""Group a loader's batches into optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import torch


class StepBatch(NamedTuple):
    """Everything that one optimizer step trains on."""

    micro: tuple[Any, ...]
    num_items: torch.Tensor | None
    """Items over all micro-batches and ranks; None where the one micro-batch is the whole step."""
    first: int
    """The number, within the epoch, of the first micro-batch."""


class Batches(Protocol):
    """A loader that knows its last batch."""

    end_of_dataloader: bool

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""

    def walk_from(self, skip: int | None) -> Generator[Any]:
        """Yield batches on the device; None goes on from a restored position."""


class Feed:
    """A loader's batches, so many to a step; what is left at an epoch's end makes a smaller one."""

    def __init__(
        self,
        loader: Batches,
        num_micro: int,
        count: Callable[[tuple[Any, ...]], torch.Tensor | None],
    ) -> None:
        self.loader = loader
        self.num_micro = num_micro
        self._count = count

    def steps(self, epoch: int, first: int = 0) -> Generator[StepBatch]:
        """Yield the epoch's steps; `first` is the number of batches that are done already."""
        self.loader.set_epoch(epoch)
        micro: list[Any] = []
        with closing(self.loader.walk_from(None)) as batches:
            for batch in batches:
                micro.append(batch)
                if len(micro) == self.num_micro or self.loader.end_of_dataloader:
                    yield StepBatch(tuple(micro), self._count(tuple(micro)), first)
                    first += len(micro)
                    micro = []
