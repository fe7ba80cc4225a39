"""Put a training run together: what makes its steps, and what may replay one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anytrain.core.events import EventKind
from anytrain.engine import objective
from anytrain.engine.assemble.run import Run, unscale, veto
from anytrain.engine.data.feed import Feed
from anytrain.engine.metrics import own_rows
from anytrain.engine.optim.schedules import follows_metric
from anytrain.engine.prepared.optimizer import PreparedOptimizer
from anytrain.engine.step.guard import ScaledGuard
from anytrain.engine.step.split import num_rows
from anytrain.engine.step.update import Latch, Micro, SplittingUpdate, Update


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is made."""

    max_grad_norm: float = 0.0
    holds_bad: bool = True
    """Whether no update follows a bad step until it is looked at."""
    splits: bool = False
    """Whether a step that does not fit the memory is cut in parts."""


def build_step(
    run: Run,
    model: nn.Module,
    micro: Micro,
    options: StepOptions,
    *,
    count: Callable[[tuple[Any, ...]], torch.Tensor],
    tell: Callable[[EventKind], Any] | None,
    split: Callable[[int], None],
) -> Update:
    """Return the step of a run whose model, optimizer and schedule are prepared."""
    session, optimizer = run.session, run.optimizers[0]
    parts: dict[str, Any] = {
        "model": model,
        "micro": micro,
        "no_sync": session.world.no_sync,
        "clip": Clip(optimizer, options.max_grad_norm),
        "optimizer": optimizer,
        "schedulers": tuple(s for s in run.schedulers if not follows_metric(s)),
        "bad": bad_rule(run, optimizer),
        "tell": tell,
        "latch": Latch() if options.holds_bad else None,
    }
    if not options.splits:
        return Update(**parts)
    world, backend = session.world, session.backend
    return SplittingUpdate(
        **parts,
        is_out_of_memory=backend.is_out_of_memory,
        release=backend.release,
        agree=lambda full: any(world.gather_object(full)),
        count=count,
        share_gradients=lambda: _average_gradients(optimizer, run),
        keep_rng=lambda: keep_rng(run),
        split=split,
    )


class Clip:
    """Bound the gradient's norm and return it, on the device; a bound of 0 only measures."""

    def __init__(self, optimizer: PreparedOptimizer, max_norm: float) -> None:
        self._optimizer = optimizer
        self._max_norm = max_norm

    def __call__(self) -> torch.Tensor | None:
        """Clip, and let the guard know the norm."""
        found = [p for group in self._optimizer.param_groups for p in group["params"]]
        unscale([self._optimizer])
        if self._max_norm > 0:
            norm = torch.nn.utils.clip_grad_norm_(found, self._max_norm)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in found if p.grad is not None])
        veto([self._optimizer], norm)
        return norm


def bad_rule(run: Run, optimizer: PreparedOptimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes a step bad: a skipped update; in fp16, where those are usual, the loss."""
    world = run.session.world
    if isinstance(optimizer.guard, ScaledGuard):
        return lambda loss: world.reduce((~torch.isfinite(loss)).float(), "max")
    return lambda loss: optimizer.guard.skipped


def count_items(run: Run, model: nn.Module) -> Callable[[tuple[Any, ...]], torch.Tensor]:
    """Return what counts the items of a step's micro-batches over all ranks, on the device."""
    session = run.session
    shifted = objective.shifts_labels(model)

    def count(micro: tuple[Any, ...]) -> torch.Tensor:
        own = sum(objective.num_items(batch, shifted=shifted) for batch in micro)
        return session.world.reduce(torch.as_tensor(own, device=session.device), "sum")

    return count


def build_feed(
    run: Run,
    loader: Any,
    num_micro: int,
    count: Callable[[tuple[Any, ...]], torch.Tensor | None],
) -> Feed:
    """Return a prepared loader's steps, without the samples that only fill the last round up.

    A rank that has no sample of its own there keeps its batch, and is told so: it must go through
    the same step as the others.
    """
    rank = run.session.world.rank

    def own(batch: Any, remainder: int) -> tuple[Any, bool]:
        rows = num_rows(batch)
        if rows is None:
            return batch, True
        cut, num_own = own_rows(batch, remainder, rank, rows)
        return (cut, True) if num_own else (batch, False)

    return Feed(loader, num_micro, count, own)


def keep_rng(run: Run) -> Callable[[], None]:
    """Take down torch's generators, the host's and the device's; return what puts them back."""
    session = run.session
    host, device = torch.get_rng_state(), session.backend.rng_state(session.device)

    def put_back() -> None:
        torch.set_rng_state(host)
        if device is not None:
            session.backend.restore_rng(session.device, device)

    return put_back


def _average_gradients(optimizer: PreparedOptimizer, run: Run) -> None:
    """Average gradients over the ranks once a step's parts are all through."""
    world = run.session.world
    if world.size == 1:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.copy_(world.reduce(parameter.grad, "mean"))
