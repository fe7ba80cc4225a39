"""Put a training run together: what makes its steps, and what may replay one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from anytrain.core.events import EventKind
from anytrain.core.notices import give_notice
from anytrain.engine import objective
from anytrain.engine.assemble.run import Run, unscale
from anytrain.engine.assemble.session import Session
from anytrain.engine.data.feed import Feed
from anytrain.engine.metrics import num_own_rows, own_rows
from anytrain.engine.optim import fused
from anytrain.engine.optim.schedules import follows_metric
from anytrain.engine.prepared.cursor import Cursor
from anytrain.engine.prepared.optimizer import PreparedOptimizer
from anytrain.engine.step.activations import Activations, Fit
from anytrain.engine.step.blocks import is_compiled
from anytrain.engine.step.clip import Measure, bound
from anytrain.engine.step.eager import EagerStep, RecordedStep
from anytrain.engine.step.guard import DeviceGuard, ScaledGuard, is_finite
from anytrain.engine.step.purity.impurity import hooked, impurity, model_impurity
from anytrain.engine.step.purity.lookups import settings
from anytrain.engine.step.recorded.cuda_graph import CudaGraphs
from anytrain.engine.step.recorded.recordings import Outside, Recordings
from anytrain.engine.step.recorded.returns import UNKNOWN_LENGTH, Returns, unlimited
from anytrain.engine.step.shortcuts.shortcuts import Shortcuts, Shortening
from anytrain.engine.step.split import num_rows
from anytrain.engine.step.update import Latch, Micro, RecordedUpdate, SplittingUpdate, Update

NoSync = Callable[[nn.Module], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is made."""

    max_grad_norm: float = 0.0
    holds_bad: bool = True
    """Whether no update follows a bad step until it is looked at."""
    splits: bool = False
    """Whether a step that does not fit the memory is cut in parts."""
    own_functions: tuple[Callable[..., Any], ...] = ()
    """What of the user's code computes the loss."""
    sum_up: Callable[[Any, Any], None] | None = None
    """What adds a step's loss to the meter's sums."""
    obstacle: str | None = None
    """What of the user's own code keeps a step from being recorded; None where nothing does."""
    activations: Activations | None = None
    """What keeps fewer activations before a batch that does not fit is cut, or is an error."""
    steps_left: Callable[[], float] = lambda: UNKNOWN_LENGTH
    """Asked how many steps the run has left."""
    looks_for_unused: bool = False
    """Whether the model was prepared so that its first steps tell if they use all parameters."""
    counted: Recount | None = None
    """What counts the items of batches that the user's code makes; None where it makes none."""


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
    session.cursor.end_step = None  # the loop ends its steps itself, once they are added up
    untrained, outside = _apart(model, optimizer)
    is_shared = session.cursor.accumulation.sync_each_batch
    apart = _shared_each_batch if is_shared else session.strategy.accumulating
    looks = options.looks_for_unused and session.world.size > 1
    parts: dict[str, Any] = {
        "model": model,
        "micro": micro,
        "no_sync": partial(_unfinished, session.cursor, apart),
        "clip": Clip(
            optimizer,
            model,
            options.max_grad_norm,
            session.strategy.norm,
            untrained=untrained,
            sees_all=tell is None and not outside,
            can_read=_reads_at_once(run, optimizer),
        ),
        "untrained": untrained,
        "optimizer": optimizer,
        "schedulers": tuple(s for s in run.schedulers if not follows_metric(s)),
        "judge": Judge(run, optimizer),
        "tell": tell,
        "latch": _latch(session) if options.holds_bad else None,
        "counted": options.counted,
        "end_backward": partial(_end_backward, session, model) if looks else None,
    }
    fit = None if options.activations is None else _fit(run, options.activations)
    if not options.splits and (fit is None or session.world.size == 1):
        return _whole_step(run, {**parts, "fit": fit}, options)
    world, backend = session.world, session.backend
    if session.device.type == "cuda":
        _tell_step(session, "eager", "a step that may be cut in parts is not recorded")
    return SplittingUpdate(
        **{**parts, "no_sync": apart},
        is_out_of_memory=backend.is_out_of_memory,
        release=backend.release,
        agree=lambda full: any(world.gather_object(full)),
        most=lambda rows: max(world.gather_object(rows)),
        count=count,
        share_gradients=lambda: _average_gradients(session, optimizer),
        keep_rng=lambda: keep_rng(run),
        split=split,
        spare=fit.more if fit is not None else _nothing_spared,
        cuts=options.splits,
    )


def _average_gradients(session: Session, optimizer: PreparedOptimizer) -> None:
    """Average what a step's parts have added up on each rank."""
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    session.strategy.average_gradients(held)


def _end_backward(session: Session, model: nn.Module) -> None:
    """Complete a step's gradients; put into the plan what is learnt of unused parameters."""
    learnt = session.strategy.end_backward(model)
    if learnt is not None:
        session.revise("strategy", session.plan.strategy.value, learnt, session.cursor.updates)


def _latch(session: Session) -> Latch:
    """Return an open latch; on a device that traces it is there from the first step's graph on."""
    return Latch(torch.zeros((), device=session.device)) if session.end_step else Latch()


def _whole_step(run: Run, parts: dict[str, Any], options: StepOptions) -> Update:
    """Return a step that is not cut, recorded where that can be."""
    model, fit, own = parts["model"], parts["fit"], options.own_functions
    watched = None if parts["tell"] is None else "a callback looks into the middle of a step"
    recordings = _recordings(run, model, options.obstacle or watched, own, options.steps_left)
    if recordings is None:
        return Update(**parts)
    if fit is not None:
        fit.changed = recordings.forget
        fit.is_recorded = lambda: recordings.is_recording
    return RecordedUpdate(
        **parts,
        recordings=recordings,
        sum_up=options.sum_up,
        shortening=_shortening(run, model, options.max_grad_norm),
    )


def _fit(run: Run, activations: Activations) -> Fit:
    backend = run.session.backend
    return Fit(activations, backend.is_out_of_memory, backend.release, lambda: keep_rng(run))


def _nothing_spared() -> bool:
    """Keep every activation."""
    return False


def _shortening(
    run: Run, model: nn.Module, max_norm: float, *, is_whole: bool = True
) -> Shortening:
    """Return what does parts of a recorded step in fewer launches, where it computes the same."""
    session, optimizer = run.session, run.optimizers[0]
    exact = torch.are_deterministic_algorithms_enabled()
    plain = isinstance(optimizer.guard, DeviceGuard) and fused.fits(optimizer.optimizer)
    untrained, outside = _apart(model, optimizer)
    same = not outside and not any(p.requires_grad for p in untrained)  # what is clipped together
    if exact or not (plain and is_whole and same):
        return Shortening(None, tuple(run.optimizers))
    rounds = session.precision.name == "bf16" and not any(map(is_compiled, model.modules()))
    made = Shortcuts(model, optimizer.optimizer, max_norm, rounds=rounds, device=session.device)
    return Shortening(made, tuple(run.optimizers))


def build_own_step(
    run: Run,
    loss_fn: Callable[[nn.Module, Any], Any],
    backward: Callable[[torch.Tensor], None],
    clip: Callable[[], torch.Tensor] | None,
    max_norm: float,
    add_up: Callable[[torch.Tensor], None],
) -> EagerStep:
    """Return the step of a user's own loop, from what is prepared; `clip` bounds to `max_norm`.

    `add_up` is given each loss.
    """
    cursor, model = run.session.cursor, run.models[0]
    parts: dict[str, Any] = {
        "loss_fn": loss_fn,
        "model": model,
        "ends_update": cursor.next_micro,
        "no_sync": run.session.strategy.accumulating,
        "backward": backward,
        "clip": clip,
        "optimizers": tuple(run.optimizers),
        "schedulers": tuple(run.schedulers),
        "add_up": add_up,
    }
    # Each of a step's micro-batches is one to record, and only the last has the update.
    recordings = _recordings(
        run, model, None, (loss_fn,), lambda: UNKNOWN_LENGTH * cursor.accumulation.num_steps
    )
    if recordings is None:
        return EagerStep(**parts)
    whole = len(run.optimizers) == 1 and cursor.accumulation.num_steps == 1
    return RecordedStep(
        **parts,
        recordings=recordings,
        num_micro=lambda: cursor.accumulation.num_steps,
        shortening=_shortening(run, model, max_norm, is_whole=whole),
    )


def _recordings(
    run: Run,
    model: nn.Module,
    obstacle: str | None,
    functions: tuple[Callable[..., Any], ...],
    steps_left: Callable[[], float] = lambda: UNKNOWN_LENGTH,
) -> Recordings | None:
    """Return what records steps of these functions; None where they run op by op."""
    session = run.session
    planned, is_free = session.planned.step, session.planned.step_is_free
    if session.device.type != "cuda" and is_free:
        session.revise("step", "eager", f"steps are recorded on CUDA, not on {session.device.type}")
    if session.device.type != "cuda" or not (is_free or planned.value == "cuda_graph"):
        return None
    inner = run.unwrap(model, keep_forward=True, keep_compiled=True)
    looked_up: Callable[[], tuple[Any, ...]] = tuple
    obstacle = obstacle or _obstacle(run)
    if obstacle is None:
        obstacle, looked_up = _read(inner, functions)
    if obstacle is not None:
        _tell_step(session, "eager", obstacle)
        return None
    if is_free:
        _tell_step(session, "eager", "the first steps run op by op; then they are recorded")
    return Recordings(
        CudaGraphs(session.device),
        model,
        tuple(optimizer.optimizer for optimizer in run.optimizers),
        partial(_tell_step, session),
        session.ledger.span("record"),
        Returns(
            steps_left if is_free else unlimited, lambda: session.plan.shapes.value == "buckets"
        ),
        Outside(lambda: hooked(inner) or _obstacle(run), looked_up),
    )


def _read(
    model: nn.Module, functions: tuple[Callable[..., Any], ...]
) -> tuple[str | None, Callable[[], tuple[Any, ...]]]:
    """Return what of the user's code is in the way, and what reads the values it looks up."""
    try:
        found = (impurity(function) for function in functions)
        obstacle = next(filter(None, found), None) or model_impurity(model)
        return obstacle, settings(*functions, model=model)
    except Exception as error:  # noqa: BLE001  objects of the user's with ways of their own
        return f"your code could not be read: {type(error).__name__}: {error}", tuple


def _tell_step(session: Session, value: str, because: str) -> None:
    """Put into the plan how steps run from here on; say it aloud where somebody asked otherwise."""
    session.revise("step", value, because, session.cursor.updates)
    if value == "eager" and session.planned.step.value == "cuda_graph":
        give_notice(
            f"Steps are not recorded, though {session.planned.step.because} asks for it: "
            f"{because}.",
            stacklevel=2,
        )


def _obstacle(run: Run) -> str | None:
    """Name what of a run's parts cannot be recorded; None where everything can."""
    session = run.session
    if session.world.size > 1:
        return "several processes: they share gradients while they are computed"
    for optimizer in run.optimizers:
        kind = type(optimizer.optimizer).__name__
        inner: Any = optimizer.optimizer
        if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
            return f"a hook on {kind}'s step is called at every step"
        if not optimizer.guard.decides_on_device:
            return f"{kind} is not fused, so the host decides whether an update is skipped"
    for scheduler in run.schedulers:
        if not follows_metric(scheduler) and not scheduler.follows_device:
            kind = type(scheduler.scheduler).__name__
            return f"{kind} needs the host at every step"
    return None


def _reads_at_once(run: Run, optimizer: PreparedOptimizer) -> bool:
    """Whether values are in host memory, and the host decides by them."""
    return run.session.device.type == "cpu" and not optimizer.guard.decides_on_device


def _apart(
    model: nn.Module, optimizer: PreparedOptimizer
) -> tuple[tuple[nn.Parameter, ...], tuple[Any, ...]]:
    """Return the model's parameters that the optimizer has not, and the other way round."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    own = {id(p): p for p in model.parameters()}
    untrained = tuple(p for key, p in own.items() if key not in held)
    return untrained, tuple(p for key, p in held.items() if key not in own)


class Clip:
    """Bound the norm of the model's gradient and return it, on the device; 0 only measures."""

    def __init__(
        self,
        optimizer: PreparedOptimizer,
        model: nn.Module,
        max_norm: float,
        measure: Measure,
        *,
        untrained: tuple[nn.Parameter, ...] = (),
        sees_all: bool,
        can_read: bool,
    ) -> None:
        self._optimizer, self._model = optimizer, model
        # Only an optimizer's own gradients are scaled back.
        is_scaled = isinstance(optimizer.guard, ScaledGuard)
        self._left_out = {id(p) for p in untrained} if is_scaled else set()
        self._max_norm, self._measure = max_norm, measure
        self._can_read = can_read
        self._sees_all = sees_all
        """Whether nobody changes a gradient afterwards: the guard need not look again."""

    def __call__(self) -> torch.Tensor | None:
        """Clip, and let the guard know the norm."""
        found = [p for p in self._model.parameters() if id(p) not in self._left_out]
        unscale([self._optimizer])
        norm = bound(found, self._max_norm, self._measure, can_read=self._can_read)
        self._optimizer.guard.veto(norm, is_whole=self._sees_all)
        return norm


class Judge:
    """What makes a step bad: a loss that is not finite on any rank, or a skipped update.

    In fp16 skipped updates are usual, and the loss alone counts.
    """

    def __init__(self, run: Run, optimizer: PreparedOptimizer) -> None:
        self._world, self._optimizer = run.session.world, optimizer
        self._is_scaled = isinstance(optimizer.guard, ScaledGuard)
        # Alone on a CPU a value is read as soon as it is there; elsewhere that would be a wait.
        self._reads = run.session.world.size == 1 and _reads_at_once(run, optimizer)
        self._lost: torch.Tensor | bool = False

    def look(self, loss: torch.Tensor) -> None:
        """Keep the update of a loss that is not finite from happening, whatever its gradient."""
        if self._reads:
            self._lost = not is_finite(loss)
            if self._lost:
                self._optimizer.guard.veto(loss)
            return
        self._lost = self._world.reduce((~torch.isfinite(loss)).float(), "max")
        self._optimizer.guard.veto(torch.where(self._lost > 0, float("inf"), 0.0))

    def verdict(self) -> torch.Tensor | bool:
        """Return 1 for a bad step, else 0, once the update is through."""
        guard = self._optimizer.guard
        if isinstance(self._lost, bool):
            return self._lost or (not self._is_scaled and guard.was_skipped())
        return self._lost if self._is_scaled else torch.maximum(self._lost, guard.skipped)


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


@contextmanager
def _unfinished(cursor: Cursor, apart: NoSync, model: nn.Module) -> Iterator[None]:
    """Run a micro-batch that does not end its step, as those who look at `sync_gradients` see."""
    cursor.sync = False
    try:
        with apart(model):
            yield
    finally:
        cursor.sync = True


def _shared_each_batch(model: nn.Module) -> AbstractContextManager[None]:
    """Let every micro-batch's gradients be averaged at once: less memory, more traffic."""
    return nullcontext()


def keep_rng(run: Run) -> Callable[[], None]:
    """Take down torch's generators, the host's and the device's; return what puts them back."""
    session = run.session
    host, device = torch.get_rng_state(), None
    if session.device.type != "cpu":
        device = session.backend.rng_state(session.device)

    def put_back() -> None:
        torch.set_rng_state(host)
        if device is not None:
            session.backend.restore_rng(session.device, device)

    return put_back
