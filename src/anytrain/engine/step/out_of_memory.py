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
from anytrain.engine.step.step import Batch, Step
from anytrain.engine.tree import num_rows, take_rows


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


class SplitFactor:
    """Into how many parts each micro-batch is cut; it only grows.

    >>> parts = SplitFactor()
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
    parts: SplitFactor = field(default_factory=SplitFactor)

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
