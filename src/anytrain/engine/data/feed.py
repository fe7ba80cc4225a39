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
    is_last: bool = False
    """Whether the epoch ends with it."""
    is_last_spare: bool = False
    """Whether the last micro-batch holds nothing but repeats, so that this rank may keep pace."""

    @property
    def ends(self) -> bool:
        """Whether the update comes behind it."""
        return True

    @property
    def is_step(self) -> bool:
        """Whether it is all that the update learns from."""
        return True

    @property
    def kind(self) -> bool:
        """What two batches of like tensors must have in common to share a recording."""
        return self.is_last_spare

    def weighed(self, num_items: torch.Tensor | None) -> list[tuple[Any, torch.Tensor | None]]:
        """Return each micro-batch with the step's items: infinitely many where it is spare.

        A share of infinitely many is nothing, so repeats change neither loss nor gradient.
        """
        found: list[tuple[Any, torch.Tensor | None]] = [(m, num_items) for m in self.micro]
        if self.is_last_spare and num_items is not None:
            found[-1] = (self.micro[-1], torch.full_like(num_items, torch.inf, dtype=torch.float32))
        return found


class Batches(Protocol):
    """A loader that knows its last batch."""

    end_of_dataloader: bool

    @property
    def num_unrepeated(self) -> int:
        """How many samples of the last round are no repeats; 0 or less: all."""

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
        own: Callable[[Any, int], tuple[Any, bool]] = lambda batch, remainder: (batch, True),
    ) -> None:
        self.loader = loader
        self.num_micro = num_micro
        self._count = count
        self._own = own
        """Cuts repeats off a last batch; says whether any of it is this rank's own."""

    def steps(self, epoch: int, first: int = 0) -> Generator[StepBatch]:
        """Yield the epoch's steps; `first` is the number of batches that are done already."""
        self.loader.set_epoch(epoch)
        micro: list[Any] = []
        with closing(self.loader.walk_from(None)) as batches:
            for batch in batches:
                has_own, is_last = True, self.loader.end_of_dataloader
                if is_last:
                    batch, has_own = self._own(batch, self.loader.num_unrepeated)
                micro.append(batch)
                if len(micro) == self.num_micro or is_last:
                    counted = tuple(micro if has_own else micro[:-1])
                    items = self._count(counted)
                    yield StepBatch(tuple(micro), items, first, is_last, not has_own)
                    first += len(micro)
                    micro = []
