"""What a run asks of this room: record its step, and attend quickly.

`engine/assemble/fast_room.py` is where it asks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from anytrain.engine.assemble.fast_room import RecordingOptions
from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.steps import parted, tell_step
from anytrain.engine.optim.schedules import follows_metric
from anytrain.engine.prepared.model import replace_forward
from anytrain.engine.step.activations import is_compiled
from anytrain.engine.step.guard import DeviceGuard
from anytrain.engine.step.out_of_memory import FewerActivations
from anytrain.engine.step.step import Step
from anytrain.fast.purity.impurity import hooked, impurity, model_impurity
from anytrain.fast.purity.lookups import settings
from anytrain.fast.recorded.cuda_graph import CudaGraphs
from anytrain.fast.recorded.model_calls import CALLS, ModelShortening, RecordedModel, RecorderSlots
from anytrain.fast.recorded.payback import Payback, unlimited
from anytrain.fast.recorded.recordings import Outside, Recordings
from anytrain.fast.recorded.step import RecordedStep
from anytrain.fast.shortcuts import adam
from anytrain.fast.shortcuts.attention import attend_quickly
from anytrain.fast.shortcuts.shortcuts import Shortcuts, Shortening

__all__ = ["attend_quickly", "record", "record_calls"]


def record(run: Run, step: Step, options: RecordingOptions) -> None:
    """Let a step be recorded and replayed, or say in the plan what stands in the way."""
    session, model = run.session, step.model
    inner = run.unwrap(model, keep_forward=True, keep_compiled=True)
    looked_up: Callable[[], tuple[Any, ...]] = tuple
    obstacle = options.obstacle or _obstacle(run)
    if obstacle is None:
        obstacle, looked_up = _read(inner, options.functions)
    if obstacle is not None:
        tell_step(session, "eager", obstacle)
        return
    is_free = session.planned.step_is_free
    if is_free:
        tell_step(session, "eager", "the first steps run op by op; then they are recorded")
    recordings = Recordings(
        CudaGraphs(session.device),
        model,
        tuple(optimizer.optimizer for optimizer in run.optimizers),
        partial(tell_step, session),
        session.ledger.span("record"),
        Payback(
            options.steps_left if is_free else unlimited,
            lambda: session.plan.shapes.value in ("buckets", "trimmed"),
        ),
        Outside(lambda: hooked(inner) or _obstacle(run), looked_up),
    )
    recorded = RecordedStep(step, recordings, _shortening(run, model, options), options.sum_up)
    step.take, step.release = recorded, recorded.release
    if isinstance(step.fitting, FewerActivations):
        step.fitting.changed = recordings.forget


def record_calls(run: Run, model: nn.Module) -> None:
    """Let a model's forward and backward be replayed in a user's own loop."""
    session, forward = run.session, model.forward
    looked_up: Callable[[], tuple[Any, ...]] = tuple
    obstacle = _shared_obstacle(run)
    if obstacle is None:
        obstacle, looked_up = _read(model, ())
    if obstacle is not None:
        tell_step(session, "eager", obstacle)
        return
    because = "the first calls run op by op; then they are recorded"
    session.revise("step", "eager", because, session.cursor.updates)
    slots = next((m.slots for m in run.recorded_models), None)

    def recordings(recorder: Any) -> Recordings:
        return Recordings(
            recorder,
            model,
            (),
            partial(tell_step, session),
            session.ledger.span("record"),
            Payback(),
            Outside(lambda: hooked(model), looked_up),
            CALLS,
        )

    def shortening() -> ModelShortening:
        exact = torch.are_deterministic_algorithms_enabled()
        plain = session.precision.name == "bf16" and not any(map(is_compiled, model.modules()))
        if exact or not plain:
            return ModelShortening(None, ())
        made = Shortcuts(model, None, 0.0, rounds=True, device=session.device)
        return ModelShortening(made, ())

    recorded = RecordedModel(
        model,
        forward,
        slots or RecorderSlots(lambda: CudaGraphs(session.device)),
        recordings,
        shortening,
        partial(tell_step, session),
    )
    run.recorded_models.append(recorded)
    replace_forward(model, recorded)


def _shortening(run: Run, model: nn.Module, options: RecordingOptions) -> Shortening:
    """Return what does parts of a recorded step in fewer kernels, where it computes the same."""
    session, optimizer = run.session, run.optimizers[0]
    exact = torch.are_deterministic_algorithms_enabled()
    plain = isinstance(optimizer.guard, DeviceGuard) and adam.fits(optimizer.optimizer)
    untrained, outside = parted(model, optimizer)
    same = not outside and not any(p.requires_grad for p in untrained)  # what is clipped together
    if exact or not (plain and options.is_whole and same):
        return Shortening(None, tuple(run.optimizers))
    rounds = session.precision.name == "bf16" and not any(map(is_compiled, model.modules()))
    made = Shortcuts(
        model, optimizer.optimizer, options.max_grad_norm, rounds=rounds, device=session.device
    )
    return Shortening(made, tuple(run.optimizers))


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


def _shared_obstacle(run: Run) -> str | None:
    if run.session.world.size > 1:
        return "several processes: they share gradients while they are computed"
    return None


def _obstacle(run: Run) -> str | None:
    """Name what of a run's parts cannot be recorded; None where everything can."""
    shared = _shared_obstacle(run)
    if shared is not None:
        return shared
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
