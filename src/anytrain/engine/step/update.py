"""One optimizer step: every micro-batch forward and backward, clip, update, schedule.

INVARIANT: nothing here waits for the device. What a step leaves behind are device tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from anytrain.core.errors import NothingFits
from anytrain.core.events import EventKind
from anytrain.engine.step.activations import Fit
from anytrain.engine.step.recorded.recordings import Recordings
from anytrain.engine.step.shortcuts.shortcuts import Shortening
from anytrain.engine.step.split import Parts, num_rows, split_rows


class Micro(Protocol):
    """Forward and backward of one micro-batch; its loss, weighted, comes back detached."""

    def __call__(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | None
    ) -> torch.Tensor: ...


class Judge(Protocol):
    """What makes a step a bad one."""

    def look(self, loss: torch.Tensor) -> None:
        """Keep the update of a loss that is not finite from happening."""

    def verdict(self) -> torch.Tensor | bool:
        """Return 1 for a bad step, else 0, once the update is through."""


class Counted(Protocol):
    """The items that a step was trained on, where they are not those of the loader's batches."""

    def settle(self, loss: torch.Tensor) -> torch.Tensor:
        """Make the gradients, and the loss that is returned, means over these items."""

    def forget(self) -> None:
        """Begin to count anew."""


class StepOutput(NamedTuple):
    """What a step leaves behind, as device tensors: reading one is the only wait.

    On the CPU, where nothing waits, the verdict is read already.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    rate: torch.Tensor | float
    bad: torch.Tensor | bool
    """1 where the loss or the gradient was not finite, else 0."""
    is_summed: bool = False
    """Whether the step has added itself to the meter's sums."""


@dataclass(slots=True)
class Latch:
    """Hold updates back once a step was bad, so that no weight moves before it is looked at."""

    held: torch.Tensor | None = None

    def close(self, bad: torch.Tensor | bool) -> None:
        """Hold from here on if the step was bad; in place, so that a recording finds it again."""
        if isinstance(bad, bool):  # on the CPU, whose values can be read at once
            if bad:
                self.held = torch.full((), torch.inf)
            return
        held = torch.where(bad > 0, float("inf"), 0.0)
        if self.held is None:
            self.held = held
        else:
            torch.maximum(self.held, held, out=self.held)

    def open(self) -> None:
        """Let updates through again."""
        if self.held is not None:
            self.held.zero_()


@dataclass(slots=True)
class Update:
    """Run a step op by op."""

    model: nn.Module
    micro: Micro
    no_sync: Callable[[nn.Module], AbstractContextManager[None]]
    clip: Callable[[], torch.Tensor | None]
    optimizer: Any
    schedulers: tuple[Any, ...]
    judge: Judge
    tell: Callable[[EventKind], Any] | None = None
    """Told the middle of a step; None where nobody looks there."""
    latch: Latch | None = field(default_factory=Latch)
    fit: Fit | None = None
    """What to do where the memory is full; None where that is an error."""
    untrained: tuple[nn.Parameter, ...] = ()
    """Parameters of the model that the optimizer has not; gradients may come to them."""
    end_backward: Callable[[], None] | None = None
    """Completes gradients that ranks share; None where there is nothing to complete."""
    counted: Counted | None = None
    """None where a step trains on the loader's batches as they are."""

    def __call__(self, batch: Any) -> StepOutput:
        """Train on one step's micro-batches."""
        let_train(self.model)
        if self.fit is None:
            loss = self.gradients(batch)
        else:
            loss = self.fit.run(partial(self.gradients, batch), self.forget_gradients)
        if self.counted is not None:
            loss = self.counted.settle(loss)
        self.judge.look(loss)
        norm = self.clipped()
        if self.latch is not None and self.latch.held is not None:
            self.optimizer.guard.veto(self.latch.held)
        self._told("pre_optimizer_step")
        self.update()
        self._told("optimizer_step")
        rate = self.optimizer.param_groups[0]["lr"]
        rate = rate.clone() if isinstance(rate, torch.Tensor) else rate
        self.schedule()
        self.forget_gradients()
        bad = self.judge.verdict()
        if self.latch is not None:
            self.latch.close(bad)
        return StepOutput(loss, norm, rate, bad)

    def forget_gradients(self) -> None:
        """Let go of all gradients, of what the optimizer does not train, too."""
        self.optimizer.zero_grad()
        for parameter in self.untrained:
            parameter.grad = None
        if self.counted is not None:
            self.counted.forget()

    def end(self) -> None:
        """Let go of what was kept for the next step: there is none."""

    def update(self) -> None:
        """Update the weights."""
        self.optimizer.step()

    def schedule(self) -> None:
        """Move the learning rates on."""
        for scheduler in self.schedulers:
            scheduler.step()

    def clipped(self) -> torch.Tensor | None:
        """Bound the gradient's norm, and return it."""
        return self.clip()

    def gradients(self, batch: Any) -> torch.Tensor:
        """Compute the gradients of all micro-batches; return the step's loss."""
        *early, (last, last_items) = batch.weighed(batch.num_items)
        total: torch.Tensor | None = None
        for inputs, items in early:
            with self.no_sync(self.model):
                loss = self.micro(self.model, inputs, items)
            total = loss if total is None else total + loss
            self._told("substep_end")
        loss = self.micro(self.model, last, last_items)
        if self.end_backward is not None:
            self.end_backward()
        return loss if total is None else total + loss

    def _told(self, moment: EventKind) -> None:
        if self.tell is not None:
            self.tell(moment)


def let_train(model: nn.Module) -> None:
    """Let a model train that an evaluation, or somebody's `model.eval()`, has left otherwise."""
    inner = getattr(model, "module", model)  # what users hold of one that shares its gradients
    if not (model.training and getattr(inner, "training", True)):
        model.train()


def _nothing() -> None:
    """Do nothing: one process has nothing to release, share or put back."""


def _alone(was_full: bool) -> bool:
    """Take one process's word for all."""
    return was_full


@dataclass(slots=True)
class SplittingUpdate(Update):
    """Run a step in as many parts as its memory needs, keeping the batch that it stands for.

    A part that does not fit leaves half a gradient behind, so the step is begun again. Ranks
    agree on the number of parts before any gradient is shared.
    """

    parts: Parts = field(default_factory=Parts)
    is_out_of_memory: Callable[[BaseException], bool] = field(default=lambda error: False)
    release: Callable[[], None] = field(default=_nothing)
    agree: Callable[[bool], bool] = field(default=_alone)
    """Whether any rank was out of memory."""
    most: Callable[[int], int] = int
    """The greatest number over the ranks."""
    count: Callable[[tuple[Any, ...]], torch.Tensor] | None = None
    share_gradients: Callable[[], None] = field(default=_nothing)
    keep_rng: Callable[[], Callable[[], None]] = field(default=lambda: _nothing)
    split: Callable[[int], None] = field(default=lambda parts: None)
    """Told the new number of parts."""
    spare: Callable[[], bool] = field(default=lambda: False)
    """Asked first: keep fewer activations from here on; False where that is not possible."""
    cuts: bool = True
    """Whether the batch may be cut."""

    def gradients(self, batch: Any) -> torch.Tensor:
        """Compute the gradients in as many parts as it takes; return the step's loss."""
        put_back = self.keep_rng()
        assert self.count is not None
        items = self.count(batch.micro) if batch.num_items is None else batch.num_items
        rows = max(num_rows(inputs) or 1 for inputs in batch.micro)
        while True:
            loss = self._attempt(batch.weighed(items))
            if not self.agree(loss is None):
                assert loss is not None
                self.share_gradients()
                return loss
            self.forget_gradients()
            self.release()
            put_back()
            if self.spare():
                continue
            if not self.cuts:
                raise _too_large()
            self.parts.more(self.most(rows))
            self.split(self.parts.number)

    def _attempt(self, micro: list[tuple[Any, torch.Tensor | None]]) -> torch.Tensor | None:
        """Return the step's loss; None where a part did not fit."""
        total: torch.Tensor | None = None
        try:
            for inputs, items in micro:
                for part in split_rows(inputs, self.parts.number):
                    with self.no_sync(self.model):
                        loss = self.micro(self.model, part, items)
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


@dataclass(slots=True)
class RecordedUpdate(Update):
    """Run a step as one recording of all its device work, where that can be."""

    recordings: Recordings = field(kw_only=True)
    sum_up: Callable[[torch.Tensor, torch.Tensor | bool], None] | None = field(
        default=None, kw_only=True
    )
    """Adds a step to the meter's sums, as part of the recording."""
    shortening: Shortening = field(kw_only=True)
    _batch: Any = None

    def __call__(self, batch: Any) -> StepOutput:
        """Train on one step's micro-batches."""
        let_train(self.model)
        self._batch = batch
        inputs = (batch.micro, batch.num_items)
        found = self.recordings.find(self, inputs, batch.is_last_spare)
        if found is None:
            with self.recordings.observed(self):
                return Update.__call__(self, batch)
        for scheduler in self.schedulers:
            scheduler.walk()
        recording, tensors = found
        output: StepOutput = recording(tensors)
        self.optimizer.count_update()
        return output

    def compute(self, tree: Any) -> StepOutput:
        """Do the device's part of a step."""
        micro, num_items = tree
        batch = self._batch._replace(micro=micro, num_items=num_items)
        output: StepOutput = Update.__call__(self, batch)
        if self.sum_up is None:
            return output
        self.sum_up(output.loss, output.bad)
        return output._replace(is_summed=True)

    @property
    def is_whole(self) -> bool:
        """Whether one micro-batch is the step."""
        return len(self._batch.micro) == 1

    def end(self) -> None:
        """Let go of the recordings and their memory."""
        self.recordings.forget()
        self.shortening.end()

    def gradients(self, batch: Any) -> torch.Tensor:
        """Compute the gradients of all micro-batches; return the step's loss."""
        shortcuts = self.shortening.taken
        if shortcuts is None or not self.recordings.is_recording:
            return Update.gradients(self, batch)
        with shortcuts.forward():
            return Update.gradients(self, batch)

    def clipped(self) -> torch.Tensor | None:
        """Bound the gradient's norm, and return it."""
        shortcuts = self.shortening.taken
        if shortcuts is None or not self.recordings.is_recording:
            return Update.clipped(self)
        norm = shortcuts.measure()
        self.optimizer.guard.veto(norm)
        return norm

    def update(self) -> None:
        """Update the weights; of a recording this is the device's part alone."""
        shortcuts = self.shortening.taken
        if not self.recordings.is_recording:
            Update.update(self)
        elif shortcuts is not None:
            shortcuts.update(self.optimizer.guard.decide())
            shortcuts.clear()
        else:
            with capturable(self.optimizer.optimizer):
                self.optimizer.guard.update(self.optimizer.optimizer, None)

    def schedule(self) -> None:
        """Move the learning rates on; of a recording this is the device's part alone."""
        if self.recordings.is_recording:
            for scheduler in self.schedulers:
                scheduler.follow()
        else:
            Update.schedule(self)


@contextmanager
def capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the block record an update: torch asks for a word that fused ones don't need."""
    groups = [g for g in optimizer.param_groups if g.get("capturable") is False]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False
