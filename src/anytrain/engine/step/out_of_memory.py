"""What a step does where the memory is full: keep fewer activations, then cut the batch.

What a step learns from stays the same. An attempt that failed leaves half a gradient behind, so it
is begun again, with the random numbers that it began with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from anytrain.core.errors import NothingFits
from anytrain.engine.step.activations import Activations
from anytrain.engine.step.split import Parts, num_rows, split_rows
from anytrain.engine.step.step import Batch, Step


@dataclass(slots=True)
class FewerActivations:
    """Keep fewer activations, as often as the memory is full and some are left."""

    activations: Activations
    is_out_of_memory: Callable[[BaseException], bool]
    release: Callable[[], None]
    keep_rng: Callable[[], Callable[[], None]]
    changed: Callable[[], None] = field(default=lambda: None)
    """Told that more blocks are checkpointed from here on."""

    def more(self) -> bool:
        """Keep fewer activations from here on; False where that is not possible."""
        if not self.activations.fewer():
            return False
        self.changed()
        return True

    def gradients(self, step: Step, batch: Batch) -> torch.Tensor:
        """Compute the gradients of a batch in as many attempts as it takes; return the loss."""
        while True:
            put_back = self.keep_rng()
            try:
                return step.add_up(batch)
            except Exception as error:
                if not self.is_out_of_memory(error) or not self.more():
                    raise
            # Outside of the block above: there the error still holds the attempt's tensors.
            step.clear()
            self.release()
            put_back()


@dataclass(slots=True)
class Splitting:
    """Cut a batch in as many parts as its memory needs, keeping the batch that it stands for.

    Ranks agree on the number of parts before any gradient is shared.
    """

    is_out_of_memory: Callable[[BaseException], bool]
    count: Callable[[tuple[Any, ...]], torch.Tensor]
    release: Callable[[], None] = field(default=lambda: None)
    agree: Callable[[bool], bool] = field(default=lambda was_full: was_full)
    """Whether any rank was out of memory."""
    most: Callable[[int], int] = int
    """The greatest number over the ranks."""
    share_gradients: Callable[[], None] = field(default=lambda: None)
    keep_rng: Callable[[], Callable[[], None]] = field(default=lambda: lambda: None)
    split: Callable[[int], None] = field(default=lambda parts: None)
    """Told the new number of parts."""
    spare: Callable[[], bool] = field(default=lambda: False)
    """Asked first: keep fewer activations from here on; False where that is not possible."""
    cuts: bool = True
    """Whether the batch may be cut."""
    parts: Parts = field(default_factory=Parts)

    def gradients(self, step: Step, batch: Batch) -> torch.Tensor:
        """Compute the gradients in as many parts as it takes; return the step's loss."""
        put_back = self.keep_rng()
        items = self.count(batch.micro) if batch.num_items is None else batch.num_items
        rows = max(num_rows(inputs) or 1 for inputs in batch.micro)
        while True:
            loss = self._attempt(step, batch.weighed(items))
            if not self.agree(loss is None):
                assert loss is not None
                self.share_gradients()
                return loss
            step.clear()
            self.release()
            put_back()
            if self.spare():
                continue
            if not self.cuts:
                raise _too_large()
            self.parts.more(self.most(rows))
            self.split(self.parts.number)

    def _attempt(
        self, step: Step, micro: list[tuple[Any, torch.Tensor | None]]
    ) -> torch.Tensor | None:
        """Return the step's loss; None where a part did not fit."""
        total: torch.Tensor | None = None
        try:
            for inputs, items in micro:
                for part in split_rows(inputs, self.parts.number):
                    with step.no_sync(step.model):
                        loss = step.micro(step.model, part, items)
                    total = loss if total is None else total + loss
        except Exception as error:
            if not self.is_out_of_memory(error):
                raise
            return None
        return total


def _too_large() -> NothingFits:
    return NothingFits(
        "The device's memory is full, with every repeated block checkpointed.",
        why="the batch does not fit, and nobody allowed to cut it.",
        fix="pass auto_find_batch_size=True, which cuts it and keeps what a step learns from, or "
        "a smaller batch size.",
    )
