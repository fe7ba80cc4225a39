"""The one loop: fit and evaluate.

    for each epoch
        "epoch_begin"
        for each step
            "step_begin"
            step                      ("substep_end", "pre_optimizer_step", "optimizer_step")
            "step_end"                then log, evaluate, save, as asked
        "epoch_end"                   then log, evaluate, save, as asked

Whoever is told of a moment may ask for something; the loop does it, in one order: log, evaluate,
save. The loop asks nothing about devices or processes, and reads no value from a device. What each
part takes goes to the run's ledger; the loader itself says how long its batches were waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch

from anytrain.core.clock import Ledger
from anytrain.core.events import EventKind, Request
from anytrain.engine.metrics import (
    Collected,
    LossMean,
    gather_rows,
    num_own_rows,
    own_rows,
)
from anytrain.engine.recording.meter import Meter
from anytrain.engine.step.step import Batch, StepOutput
from anytrain.engine.tree import leaves, num_rows, take_rows
from anytrain.machine.parallel.world import World

Requests = frozenset[Request]
_LAYOUT = ("samples_per_batch", "num_micro")


@dataclass(slots=True)
class Progress:
    """How far a run has come, and how far it goes."""

    max_steps: int
    num_epochs: int
    batches_per_epoch: int
    """The length of an epoch; of the whole run where a stream has none."""
    samples_per_batch: int = 1
    """Samples of one batch over all ranks."""
    num_micro: int = 1
    """Batches of one step."""
    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epochs done."""
    batch: int = 0
    """Batches of the current epoch done."""
    this_epoch: int | None = None
    """The length of the current epoch, where that was begun with batches of another size."""
    surplus: int | None = None
    """Extra steps, against a run that had this layout from its start; None if it never changed."""
    left_at: float | None = None
    """Where the epoch before was left, if it was left early and no step has followed."""

    @property
    def epochs(self) -> float:
        """Epochs done, with the share of the current one."""
        if self.left_at is not None:
            return self.left_at
        return self.epoch + self.batch / (self.this_epoch or self.batches_per_epoch)

    def end_epoch(self) -> None:
        """Stand before the next epoch."""
        self.left_at = self.this_epoch = None
        self.epoch, self.batch = self.epoch + 1, 0

    def leave_epoch(self) -> None:
        """Stand before the next epoch, though this one has batches left."""
        here = self.epochs
        self.end_epoch()
        self.left_at = here

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the layout that it is counted in."""
        names = ("step", "epoch", "batch", "batches_per_epoch", "this_epoch", "surplus", *_LAYOUT)
        return {name: getattr(self, name) for name in names}

    def is_laid_out_like(self, state: Mapping[str, Any]) -> bool:
        """Whether a saved position counts the same batches and steps."""
        return all(state[name] == getattr(self, name) for name in _LAYOUT)


class LoopHooks(Protocol):
    """What the loop works for: it is told of moments and does what was asked."""

    def tell(self, kind: EventKind) -> Requests:
        """Let everybody know; return what they ask for now."""

    def log(self) -> None:
        """Read the meter and record it."""

    def settle(self) -> None:
        """Wait for the steps that the device has not done yet: what follows is none of them."""

    def evaluate(self) -> Requests:
        """Evaluate; return what is asked for now, a save of a new best among it."""

    def save(self) -> Requests:
        """Save the run; return what is asked for now."""

    def between(self) -> None:
        """An epoch is over, and what was asked is done: leave here, if a signal asks for it."""


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

    def steps(self, epoch: int, first: int = 0) -> Generator[Batch]:
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
                    yield Batch(tuple(micro), items, first, is_last, not has_own)
                    first += len(micro)
                    micro = []


def fit(
    job: LoopHooks,
    feed: Feed,
    step: Callable[[Any], StepOutput],
    meter: Meter,
    progress: Progress,
    ledger: Ledger | None = None,
    end_step: Callable[[], None] | None = None,
) -> None:
    """Train to the last step, or until somebody asks to stop."""
    ledger = ledger or Ledger()
    ledger.own_loop = False
    ledger.rest("other")
    asked: Requests = frozenset()
    while progress.epoch < progress.num_epochs and "stop" not in asked:
        job.tell("epoch_begin")  # of a resumed epoch too: who listens now may not have heard it
        before = progress.batch
        with closing(feed.steps(progress.epoch, progress.batch)) as batches:
            asked, was_left = _walk(job, batches, step, meter, progress, ledger, end_step)
            if before == progress.batch == 0:  # an empty epoch: the next would be as empty
                asked = asked | {"stop"}
            if not was_left:
                progress.end_epoch()
            elif "stop" not in asked:
                batches.close()  # a save names the next epoch's start, not this one's middle
                progress.leave_epoch()
            # Inside, so that a save of a run that stops names the batch it stops at.
            asked = (asked & {"stop"}) | serve(job, job.tell("epoch_end"), ledger)
            job.between()


def _walk(
    job: LoopHooks,
    batches: Iterable[Any],
    step: Callable[[Any], StepOutput],
    meter: Meter,
    progress: Progress,
    ledger: Ledger,
    end_step: Callable[[], None] | None,
) -> tuple[Requests, bool]:
    """Train on an epoch's steps; return what was asked for at its end, and if it was left early."""
    asked: Requests = frozenset()
    computing = ledger.span("step")
    for batch in batches:
        if progress.step >= progress.max_steps:  # resumed where nothing is left to do
            return frozenset({"stop"}), True
        job.tell("step_begin")
        # The ledger's entry is switched by hand: this comes at every step.
        before, now = ledger.running, perf_counter()
        before.seconds += now - ledger.since
        ledger.running, ledger.since = computing, now
        computing.uses += 1
        try:
            done = step(batch)
            meter.add(done.loss, done.grad_norm, done.rate, done.bad, done.is_summed)
            if end_step is not None:
                end_step()
        finally:
            now = perf_counter()
            computing.seconds += now - ledger.since
            ledger.running, ledger.since = before, now
        progress.left_at = None
        progress.step += 1
        progress.batch += len(batch.micro)
        asked = job.tell("step_end")
        if asked:
            asked = serve(job, asked, ledger)
        if progress.step >= progress.max_steps:
            asked = asked | {"stop"}
        if asked & {"stop", "stop_epoch"} and not batch.is_last:
            return asked, True
    return asked, False


def serve(job: LoopHooks, asked: Requests, ledger: Ledger) -> Requests:
    """Do what was asked for, in one order; return what is asked for afterwards."""
    if "log" in asked:
        job.log()
    if asked & {"evaluate", "save"}:
        with ledger.span("wait"):
            job.settle()
    if "evaluate" in asked:
        with ledger.span("evaluate"):
            asked = job.evaluate()
    if "save" in asked:
        with ledger.span("save"):
            asked = job.save()
    return asked


@dataclass(slots=True)
class Predictions:
    """What an evaluation keeps of its batches, one part a kind."""

    logits: Collected | None = None
    labels: Collected | None = None
    inputs: Collected | None = None
    losses: Collected | None = None
    loss: LossMean = field(default_factory=LossMean)
    num_rows: int = 0
    own_rows: int | None = None
    """How many rows of the batch under way count; None where nobody knows."""


@dataclass(slots=True)
class EvaluationLoop:
    """How one evaluation goes: what predicts, what reduces, what looks at each batch."""

    loader: Any
    world: World
    predict: Callable[[Any], tuple[Any, Any, Any, Any]]
    """A batch's loss, logits, labels and kept inputs; each may be None."""
    batch_done: Callable[[Any, Any, Any, Any, bool], None]
    """Told each batch's gathered losses, logits, labels and inputs, and whether it is the last."""
    keep: Predictions = field(default_factory=Predictions)
    reduce: Callable[[Any, Any], Any] | None = None
    """What is kept of the logits, from them and the labels; it sees the rows that count alone."""
    end_step: Callable[[], None] | None = None
    """Ends each batch's graph before anything of it is read; None where the device has none."""
    keeps_repeats: bool = False
    """Whether ranks predict whole batches, and what repeats give is cut off afterwards.

    Somebody's own code may gather what it computes, and then all ranks' must have one shape.
    """


def evaluate(job: EvaluationLoop) -> Predictions:
    """Predict every sample once, batch by batch; nothing but what `keep` holds stays in memory.

    A rank without a row of its own in the last round predicts too: the others may wait for it.
    """
    keep, world = job.keep, job.world
    for batch in job.loader:
        is_last = bool(getattr(job.loader, "end_of_dataloader", False))
        rows = num_rows(batch)
        if is_last and rows is not None:
            batch, rows = _own(batch, rows, job)
        keep.own_rows = rows
        loss, logits, labels, inputs, cut = _predicted(job, batch, rows)
        losses = (
            loss.detach().mean().repeat(rows or 1) if keep.losses and loss is not None else None
        )
        losses, logits, labels, inputs = gather_rows((losses, logits, labels, inputs), world)
        for kept, found in (
            (keep.losses, losses),
            (keep.logits, logits),
            (keep.labels, labels),
            (keep.inputs, inputs),
        ):
            if kept is not None and found is not None:
                kept.add(found, cut)
        keep.num_rows += rows or 0
        if job.end_step is not None:
            job.end_step()
        if cut is not None:
            whole = num_rows(batch) or cut
            logits, labels, inputs = take_rows((logits, labels, inputs), slice(0, cut), whole)
        job.batch_done(losses, logits, labels, inputs, is_last)
    return keep


def _predicted(job: EvaluationLoop, batch: Any, rows: int | None) -> tuple[Any, ...]:
    """Return what comes of a batch's own rows: its loss, logits, labels and kept inputs.

    The last entry is how many rows the caller still has to keep, on the host; None where the rest
    is cut off here already. A batch with surplus rows is predicted whole and the surplus cut off,
    unless an output does not have one row for each of the batch: then its own rows are predicted
    by themselves.
    """
    loss, logits, labels, inputs = job.predict(batch)
    if rows == 0 or job.keeps_repeats:
        return *_cut_late(job, batch, rows, (loss, logits, labels, inputs)), None
    whole, found = num_rows(batch) or rows or 1, (logits, labels, inputs)
    has_more = rows is not None and rows < whole
    if has_more and not all(_has_rows(leaf, whole) for leaf in leaves(found)):
        has_more = False
        loss, logits, labels, inputs = job.predict(take_rows(batch, slice(0, rows), whole))
    if loss is not None:
        job.keep.loss.add(loss, rows or 1)
    differs = job.reduce is not None or job.keep.losses is not None or job.world.size > 1
    is_late = has_more and job.end_step is not None and not differs
    if job.end_step is not None and (job.reduce or job.keep.losses or (has_more and differs)):
        # Before anything that may differ from batch to batch: all of them share one graph so far.
        job.end_step()
    if has_more and not is_late:
        logits, labels, inputs = take_rows((logits, labels, inputs), slice(0, rows), whole)
    if logits is not None and job.reduce is not None:
        logits = job.reduce(logits, labels)
    return loss, logits, labels, inputs, rows if is_late else None


def _cut_late(job: EvaluationLoop, batch: Any, rows: int | None, found: tuple[Any, ...]) -> Any:
    """Return what came of a whole batch, without its repeats; of one that has no other, nothing."""
    loss, logits, labels, inputs = found
    if job.end_step is not None:
        job.end_step()
    if logits is not None and job.reduce is not None:
        logits = job.reduce(logits, labels)
    if rows == 0:
        return None, None, None, None
    if loss is not None:
        job.keep.loss.add(loss, rows or 1)
    held = num_rows(batch)
    if rows is None or held is None:
        return loss, logits, labels, inputs
    return loss, *take_rows((logits, labels, inputs), slice(0, rows), held)


def _has_rows(leaf: Any, rows: int) -> bool:
    return leaf is None or (getattr(leaf, "ndim", 0) > 0 and len(leaf) == rows)


def _own(batch: Any, rows: int, job: EvaluationLoop) -> tuple[Any, int]:
    """Return the last batch as it is predicted, and how many of its rows are its own.

    Repeats are cut off, or masked where the loader's batches keep to a few shapes. What a
    collator has added it has masked; alone in its world, a rank has no other.
    """
    world, remainder = job.world, int(getattr(job.loader, "num_unrepeated", -1))
    shaper: Any = getattr(job.loader, "collate_fn", None)
    if hasattr(shaper, "hide") and shaper.can_hide(batch):
        held, num_own = num_own_rows(batch, remainder, world.rank, rows)
        if world.size > 1 and num_own < held:
            batch = shaper.hide(batch, num_own)
        return batch, num_own
    cut, num_own = own_rows(batch, remainder, world.rank, rows)
    return (batch if num_own == 0 or job.keeps_repeats else cut), num_own
