"""One optimizer step, for both doors: the gradients of its micro-batches, then the update.

These are its two phases: work on the device between two places where the host may look. A step runs
them op by op, or as one recording of both; either way it is the same functions that compute.

INVARIANT: nothing here waits for the device. What a step leaves behind are device tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from anytrain.core.events import EventKind
from anytrain.engine.step.guard import Judge
from anytrain.machine.backends.base import Backend


class Micro(Protocol):
    """Forward and backward of one micro-batch; its loss, weighted, comes back detached."""

    def __call__(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | None
    ) -> torch.Tensor: ...


class Batch(NamedTuple):
    """What one call of a step trains on: a whole step, or one batch of a user's own loop."""

    micro: tuple[Any, ...]
    """The micro-batches."""
    num_items: torch.Tensor | None = None
    """Items over all micro-batches and ranks; None where each loss is its own mean."""
    first: int = 0
    """The number, within the epoch, of the first micro-batch."""
    is_last: bool = False
    """Whether the epoch ends with it."""
    is_last_spare: bool = False
    """Whether the last micro-batch holds nothing but repeats, so that this rank may keep pace."""
    ends: bool = True
    """Whether the update comes behind it."""
    num_in_step: int = 1
    """How many of these the update learns from."""

    @property
    def is_step(self) -> bool:
        """Whether it is all that the update learns from."""
        return self.num_in_step == 1

    @property
    def kind(self) -> Hashable:
        """What two batches of like tensors must have in common to share a recording."""
        return self.is_last_spare, self.ends, self.num_in_step

    def weighed(self, num_items: torch.Tensor | None) -> list[tuple[Any, torch.Tensor | None]]:
        """Return each micro-batch with the step's items: infinitely many where it is spare.

        A share of infinitely many is nothing, so repeats change neither loss nor gradient.
        """
        found: list[tuple[Any, torch.Tensor | None]] = [(m, num_items) for m in self.micro]
        if self.is_last_spare and num_items is not None:
            found[-1] = (self.micro[-1], torch.full_like(num_items, torch.inf, dtype=torch.float32))
        return found


class Recounted(Protocol):
    """The items that a step was trained on, where they are not those of the loader's batches."""

    def settle(self, loss: torch.Tensor) -> torch.Tensor:
        """Make the gradients, and the loss that is returned, means over these items."""

    def forget(self) -> None:
        """Begin to count anew."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step leaves behind, as device tensors: reading one is the only wait.

    On the CPU, where nothing waits, the verdict is read already. In a loop of your own,
    `loss, grad_norm = step(batch)`.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None = None
    """None where no update came, or nobody asked for it."""
    rate: torch.Tensor | float = 0.0
    """The learning rate that the update had, in a Trainer's loop."""
    bad: torch.Tensor | bool = False
    """1 where the loss or the gradient was not finite, else 0; in a Trainer's loop."""
    is_summed: bool = False
    """Whether the step has added itself to the meter's sums."""

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        """Yield the loss and the norm."""
        return iter((self.loss, self.grad_norm))


class Ops(Protocol):
    """How the parts of a step are computed; a recording may do it in fewer kernels."""

    def passes(self) -> AbstractContextManager[None]:
        """Return what the forward and backward passes run in."""

    def clip(self) -> torch.Tensor | None:
        """Bound the gradient's norm and return it; None where nobody asked for it."""

    def update(self) -> None:
        """Update the weights."""

    def schedule(self) -> None:
        """Move the learning rates on."""

    def clear(self) -> None:
        """Let go of the gradients."""


@dataclass(slots=True)
class TorchOps:
    """The parts of a step as torch computes them, op by op."""

    optimizers: tuple[Any, ...]
    schedulers: tuple[Any, ...]
    clip: Callable[[], torch.Tensor | None]
    measures: bool = True
    """Whether a step returns the gradient's norm; else `clip` does nothing."""
    untrained: tuple[nn.Parameter, ...] = ()
    """Parameters of the model that no optimizer has; gradients may come to them."""
    reuses_gradients: Callable[[], bool] = lambda: False
    """Whether gradients are zeroed in place: recordings of micro-batches add to them."""

    def passes(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def schedule(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def clear(self) -> None:
        """Let go of all gradients, of what no optimizer trains, too."""
        how = {"set_to_none": False} if self.reuses_gradients() else {}
        for optimizer in self.optimizers:
            optimizer.zero_grad(**how)
        for parameter in self.untrained:
            parameter.grad = None


class Fitting(Protocol):
    """What is done where the memory is full."""

    def gradients(self, step: Step, batch: Batch) -> torch.Tensor:
        """Compute the gradients of a batch in as many attempts as it takes; return the loss."""


@dataclass(slots=True)
class Step:
    """The step of one run."""

    model: nn.Module
    micro: Micro
    no_sync: Callable[[nn.Module], AbstractContextManager[None]]
    ops: TorchOps
    judge: Judge | None = None
    """What a step that is not finite means; None where that is the loop's own business."""
    tell: Callable[[EventKind], Any] | None = None
    """Told the middle of a step; None where nobody looks there."""
    fitting: Fitting | None = None
    """None where a full memory is an error."""
    end_backward: Callable[[], None] | None = None
    """Completes gradients that ranks share; None where there is nothing to complete."""
    recounted: Recounted | None = None
    """None where a step trains on the loader's batches as they are."""
    lets_train: bool = True
    """Whether the model is put into training mode first; a user's own loop does that itself."""
    take: Callable[[Any], StepOutput] = field(init=False)
    """Both phases of a step: `run`, or what has wrapped it to record it."""
    release: Callable[[], None] = field(default=lambda: None, init=False)
    """Lets go of recordings and their memory."""

    def __post_init__(self) -> None:
        """Run op by op until somebody wraps it."""
        self.take = self.run

    def __call__(self, batch: Batch) -> StepOutput:
        """Train on one batch."""
        if self.lets_train:
            let_train(self.model)
        return self.take(batch)

    def run(self, batch: Batch, ops: Ops | None = None) -> StepOutput:
        """Run both phases, op by op or as these ops do it."""
        if ops is not None:  # what records has its own way with a full memory
            with ops.passes():
                loss = self.add_up(batch)
        elif self.fitting is not None:
            loss = self.fitting.gradients(self, batch)
        else:
            loss = self.add_up(batch)
        if self.recounted is not None:
            loss = self.recounted.settle(loss)
        return self.update(loss, ops) if batch.ends else StepOutput(loss)

    def add_up(self, batch: Batch) -> torch.Tensor:
        """Add up the gradients of all micro-batches in one attempt; return the loss."""
        *early, (last, last_items) = batch.weighed(batch.num_items)
        total: torch.Tensor | None = None
        for inputs, items in early:
            with self.no_sync(self.model):
                loss = self.micro(self.model, inputs, items)
            total = loss if total is None else total + loss
            if self.tell is not None:
                self.tell("substep_end")
        if not batch.ends:
            with self.no_sync(self.model):
                return self.micro(self.model, last, last_items)
        loss = self.micro(self.model, last, last_items)
        if self.end_backward is not None:
            self.end_backward()
        return loss if total is None else total + loss

    def update(self, loss: torch.Tensor, ops: Ops | None = None) -> StepOutput:
        """Clip, update the weights, move the learning rates on, let go of the gradients."""
        ops = ops or self.ops
        if self.judge is not None:
            self.judge.look(loss)
        norm = ops.clip()
        if self.tell is not None:
            self.tell("pre_optimizer_step")
        ops.update()
        if self.tell is not None:
            self.tell("optimizer_step")
        rate = self.ops.optimizers[0].param_groups[0]["lr"] if self.judge is not None else 0.0
        rate = rate.clone() if isinstance(rate, torch.Tensor) else rate
        ops.schedule()
        self.clear(ops)
        bad = False if self.judge is None else self.judge.verdict()
        return StepOutput(loss, norm, rate, bad)

    def clear(self, ops: Ops | None = None) -> None:
        """Let go of the gradients, as after an update or an attempt that failed."""
        (ops or self.ops).clear()
        if self.recounted is not None:
            self.recounted.forget()


def let_train(model: nn.Module) -> None:
    """Let a model train that an evaluation, or somebody's `model.eval()`, has left otherwise."""
    inner = getattr(model, "module", model)  # what users hold of one that shares its gradients
    if not (model.training and getattr(inner, "training", True)):
        model.train()


def keep_rng(backend: Backend, device: torch.device) -> Callable[[], None]:
    """Take down torch's generators, the host's and the device's; return what puts them back."""
    host = torch.get_rng_state()
    there = None if device.type == "cpu" else backend.rng_state(device)

    def put_back() -> None:
        torch.set_rng_state(host)
        if there is not None:
            backend.restore_rng(device, there)

    return put_back
