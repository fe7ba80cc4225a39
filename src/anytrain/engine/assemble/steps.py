"""Put a step together from what is prepared, for the Trainer's loop and for a user's own."""

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
from anytrain.engine.assemble.fast_room import UNKNOWN_LENGTH, RecordingOptions, fast_room
from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.session import Session
from anytrain.engine.optim.schedules import follows_metric
from anytrain.engine.prepared.optimizer import PreparedOptimizer
from anytrain.engine.prepared.walk import Cursor
from anytrain.engine.step.activations import Activations
from anytrain.engine.step.guard import Clip, Judge
from anytrain.engine.step.out_of_memory import FewerActivations, Splitting
from anytrain.engine.step.step import Micro, Recounted, Step, TorchOps, keep_rng

NoSync = Callable[[nn.Module], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How the step of a Trainer's loop is made."""

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
    recounted: Recounted | None = None
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
) -> Step:
    """Return the step of a run whose model, optimizer and schedule are prepared."""
    session, optimizer = run.session, run.optimizers[0]
    session.cursor.end_step = None  # the loop ends its steps itself, once they are added up
    untrained, outside = parted(model, optimizer)
    is_shared = session.cursor.accumulation.sync_each_batch
    apart = _shared_each_batch if is_shared else session.strategy.accumulating
    looks = options.looks_for_unused and session.world.size > 1
    fewer = None if options.activations is None else _fewer(run, options.activations)
    cuts = options.splits or (fewer is not None and session.world.size > 1)
    clip = Clip(
        optimizer,
        model,
        options.max_grad_norm,
        session.strategy.norm,
        untrained=untrained,
        sees_all=tell is None and not outside,
        can_read=_reads_at_once(run, optimizer),
    )
    schedulers = tuple(s for s in run.schedulers if not follows_metric(s))
    step = Step(
        model,
        micro,
        apart if cuts else partial(_unfinished, session.cursor, apart),
        TorchOps((optimizer,), schedulers, clip, untrained=untrained),
        judge=_judge(run, optimizer, holds=options.holds_bad),
        tell=tell,
        fitting=_splitting(run, options, fewer, count, split) if cuts else fewer,
        end_backward=partial(_end_backward, session, model) if looks else None,
        recounted=options.recounted,
    )
    if not cuts:
        watched = None if tell is None else "a callback looks into the middle of a step"
        _record(
            run,
            step,
            RecordingOptions(
                options.own_functions,
                options.obstacle or watched,
                options.max_grad_norm,
                options.sum_up,
                options.steps_left,
            ),
        )
    elif session.device.type == "cuda":
        tell_step(session, "eager", "a step that may be cut in parts is not recorded")
    return step


def build_own_step(
    run: Run,
    loss_fn: Callable[[nn.Module, Any], Any],
    backward: Callable[[torch.Tensor], None],
    clip: Callable[[], torch.Tensor] | None,
    max_norm: float,
) -> Step:
    """Return the step of a user's own loop, from what is prepared; `clip` bounds to `max_norm`."""
    accumulation = run.session.cursor.accumulation

    def micro(model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        loss: torch.Tensor = loss_fn(model, inputs)
        backward(loss)
        return loss.detach()

    ops = TorchOps(
        tuple(run.optimizers), tuple(run.schedulers), clip or _nothing, measures=clip is not None
    )
    strategy = run.session.strategy
    step = Step(run.models[0], micro, strategy.accumulating, ops, lets_train=False)
    # Each of a step's micro-batches is one to record, and only the last has the update.
    _record(
        run,
        step,
        RecordingOptions(
            (loss_fn,),
            max_grad_norm=max_norm,
            steps_left=lambda: UNKNOWN_LENGTH * run.session.cursor.accumulation.num_steps,
            is_whole=len(run.optimizers) == 1 and accumulation.num_steps == 1,
        ),
    )
    if step.take != step.run:
        run.stop_recording()  # the step is recorded as a whole
        ops.reuses_gradients = lambda: run.session.cursor.accumulation.num_steps > 1
    return step


def _record(run: Run, step: Step, options: RecordingOptions) -> None:
    """Let the step be recorded where that is planned and can be."""
    session = run.session
    planned, is_free = session.planned.step, session.planned.step_is_free
    if session.device.type != "cuda" and is_free:
        session.revise("step", "eager", f"steps are recorded on CUDA, not on {session.device.type}")
    if session.device.type != "cuda" or not (is_free or planned.value == "cuda_graph"):
        return
    room = fast_room()
    if room is None:
        tell_step(session, "eager", "anytrain.fast, which records steps, is not installed")
    else:
        room.record(run, step, options)


def _judge(run: Run, optimizer: PreparedOptimizer, *, holds: bool) -> Judge:
    session = run.session
    # On a device that traces, what holds updates back is there from the first step's graph on.
    held = torch.zeros((), device=session.device) if holds and session.end_step else None
    return Judge(
        optimizer,
        lambda lost: session.world.reduce(lost, "max"),
        reads=session.world.size == 1 and _reads_at_once(run, optimizer),
        holds=holds,
        held=held,
    )


def _fewer(run: Run, activations: Activations) -> FewerActivations:
    session = run.session
    backend = session.backend
    return FewerActivations(
        activations,
        backend.is_out_of_memory,
        backend.release,
        partial(keep_rng, backend, session.device),
    )


def _splitting(
    run: Run,
    options: StepOptions,
    fewer: FewerActivations | None,
    count: Callable[[tuple[Any, ...]], torch.Tensor],
    split: Callable[[int], None],
) -> Splitting:
    session, optimizer = run.session, run.optimizers[0]
    world, backend = session.world, session.backend
    return Splitting(
        backend.is_out_of_memory,
        count,
        release=backend.release,
        agree=lambda full: any(world.gather_object(full)),
        most=lambda rows: max(world.gather_object(rows)),
        share_gradients=lambda: _average_gradients(session, optimizer),
        keep_rng=partial(keep_rng, backend, session.device),
        split=split,
        spare=_nothing_spared if fewer is None else fewer.more,
        cuts=options.splits,
    )


def _nothing() -> None:
    """Neither measure nor clip."""


def _nothing_spared() -> bool:
    """Keep every activation."""
    return False


def _average_gradients(session: Session, optimizer: PreparedOptimizer) -> None:
    """Average what a step's parts have added up on each rank."""
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    session.strategy.average_gradients(held)


def _end_backward(session: Session, model: nn.Module) -> None:
    """Complete a step's gradients; put into the plan what is learnt of unused parameters."""
    learnt = session.strategy.end_backward(model)
    if learnt is not None:
        session.revise("strategy", session.plan.strategy.value, learnt, session.cursor.updates)


def tell_step(session: Session, value: str, because: str) -> None:
    """Put into the plan how steps run from here on; say it aloud where somebody asked otherwise."""
    session.revise("step", value, because, session.cursor.updates)
    if value == "eager" and session.planned.step.value == "cuda_graph":
        give_notice(
            f"Steps are not recorded, though {session.planned.step.because} asks for it: "
            f"{because}.",
            stacklevel=2,
        )


def _reads_at_once(run: Run, optimizer: PreparedOptimizer) -> bool:
    """Whether values are in host memory, and the host decides by them."""
    return run.session.device.type == "cpu" and not optimizer.guard.decides_on_device


def parted(
    model: nn.Module, optimizer: PreparedOptimizer
) -> tuple[tuple[nn.Parameter, ...], tuple[Any, ...]]:
    """Return the model's parameters that the optimizer has not, and the other way round."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    own = {id(p): p for p in model.parameters()}
    untrained = tuple(p for key, p in own.items() if key not in held)
    return untrained, tuple(p for key, p in held.items() if key not in own)


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
