"""A loader's batches as steps, and the items that their losses are means over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anytrain.engine import objective
from anytrain.engine.assemble.run import Run
from anytrain.engine.data.feed import Feed
from anytrain.engine.metrics import num_own_rows, own_rows
from anytrain.engine.tree import num_rows


def build_feed(
    run: Run,
    loader: Any,
    num_micro: int,
    count: Callable[[tuple[Any, ...]], torch.Tensor | None],
    *,
    keeps_repeats: bool = False,
) -> Feed:
    """Return a prepared loader's steps, without the samples that only fill the last round up.

    A rank that has no sample of its own there keeps its batch, and is told so: it must go through
    the same step as the others. Where a loader's batches keep to a few shapes, such samples are
    masked and not cut off. With `keeps_repeats`, ranks train on them, as HF's do: somebody's own
    code may gather what it computes, and then all ranks' must have one shape.
    """
    world = run.session.world
    shaper = loader.collate_fn if hasattr(getattr(loader, "collate_fn", None), "hide") else None

    def own(batch: Any, remainder: int) -> tuple[Any, bool]:
        rows = num_rows(batch)
        if rows is None:
            return batch, True
        if shaper is not None and shaper.can_hide(batch):
            if world.size == 1:  # a collator has masked what it added, and there is nothing else
                return batch, True
            _, num_own = num_own_rows(batch, remainder, world.rank, rows)
            cut = shaper.hide(batch, num_own)
        elif keeps_repeats and world.size > 1:
            return batch, True
        else:
            cut, num_own = own_rows(batch, remainder, world.rank, rows)
        return (cut, True) if num_own else (batch, False)

    return Feed(loader, num_micro, count, own)


def count_items(run: Run, model: nn.Module) -> Callable[[tuple[Any, ...]], torch.Tensor]:
    """Return what counts the items of a step's micro-batches over all ranks, on the device."""
    session = run.session
    shifted = objective.shifts_labels(model)

    def count(micro: tuple[Any, ...]) -> torch.Tensor:
        own = sum(objective.num_items(batch, shifted=shifted) for batch in micro)
        if not isinstance(own, torch.Tensor):  # filled by a kernel: to copy it would wait
            own = torch.full((), own, device=session.device)
        return session.world.reduce(own, "sum")

    return count


class Recount:
    """The items of a step, as its losses were weighed, where they may not be the loader's.

    How many a step trains on is known when its last micro-batch is made; its losses have been
    shares of the loader's count until then.
    """

    def __init__(self, run: Run, model: nn.Module) -> None:
        self._world, self._device, self._model = run.session.world, run.session.device, model
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self._own: torch.Tensor | float = 0.0
        self._whole: torch.Tensor | None = None

    def take(self, own: torch.Tensor | int, whole: torch.Tensor | int) -> None:
        """Count a micro-batch, whose loss is `own` shares of `whole`; infinitely many: none."""
        whole = torch.as_tensor(whole, dtype=torch.float32, device=self._device).clamp(min=1)
        self._own = self._own + own * torch.isfinite(whole)
        self._whole = whole if self._whole is None else torch.minimum(self._whole, whole)

    def settle(self, loss: torch.Tensor) -> torch.Tensor:
        """Make gradients means over what all ranks have counted; return the loss as such a mean."""
        own = torch.as_tensor(self._own, dtype=torch.float32, device=self._device)
        counted = self._world.reduce(own, "sum")
        if self._whole is None:  # a training_step that weighs its loss by itself
            return loss
        factor = torch.where(counted > 0, self._whole / counted.clamp(min=1), 1.0)
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)
        return loss * factor
