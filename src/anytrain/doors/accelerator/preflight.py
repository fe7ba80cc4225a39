"""`Accelerator.preflight()`: what awaits a step of your own on devices that are not here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from anytrain.core.errors import WrongOrder
from anytrain.doors.described import run_facts
from anytrain.engine import precision as precisions
from anytrain.engine.assemble.run import Run, guard_for
from anytrain.engine.prepared.model import cast_forward, move
from anytrain.engine.prepared.optimizer import follow
from anytrain.engine.tree import map_tensors, num_rows
from anytrain.insight.preflight.fake_device.weights import claim_weights
from anytrain.insight.preflight.loaders import sized
from anytrain.insight.preflight.observer import TraceObserver, present
from anytrain.insight.preflight.recorder import NUM_UPDATES
from anytrain.insight.preflight.report import Report
from anytrain.insight.preflight.run import Start, preflight_of
from anytrain.insight.preflight.targets import parse_targets
from anytrain.insight.preflight.trace_process import trace_call
from anytrain.machine.backends import probe

if TYPE_CHECKING:
    from anytrain.doors.accelerator.facade import Accelerator


class Foretelling:
    """What an Accelerator can say of a step before it is taken."""

    def preflight(
        self: Any,
        step_fn: Callable[[Any], Any],
        batch: Any,
        targets: str | Sequence[str] = (),
        *,
        num_processes: int | None = None,
        quick: bool = False,
        thorough: bool = False,
    ) -> Report:
        """Return what awaits a step on targets such as "mps:16GB"; without any, here.

        `step_fn(batch)` takes one whole step with what was prepared: forward, backward, update.
        It is called in a copy of this process, with the batch on a device that is only claimed:
        no weight moves. What `accelerator.step(loss_fn)` returns is such a function. Print the
        report, or ask it for `as_json()` or `as_html()`. A quick one does not look for the
        largest batch, a thorough one looks for it with bf16 and activation checkpointing, too.
        `num_processes` says how many will train together; without it, as many as do now.

        Args:
            step_fn: `f(batch)`, which takes one whole step.
            batch: A batch, as the loader gives it.
            targets: Devices and their memory, such as "mps:16GB" or ["cuda:24GB",
                "tpu:v5e"]. None: this machine's device.
            num_processes: How many processes will train together. None: as many as now.
            quick: Skip the search for the largest batch.
            thorough: Search for the largest batch with bf16 and activation checkpointing
                too.
        """
        if not self._run.models or not self._run.optimizers:
            raise WrongOrder(
                "Nothing was prepared for the step.",
                why="it is traced with the prepared models and optimizers, put on another device.",
                fix="call accelerator.prepare(model, optimizer) first.",
            )
        words = (targets,) if isinstance(targets, str) else tuple(targets)
        return preflight_of(
            lambda target, setting: trace_call(
                target, lambda: _taken(self, step_fn, batch), setting
            ),
            parse_targets(words),
            start=Start(num_processes or self.num_processes),
            quick=quick,
            thorough=thorough,
        )


def _taken(accelerator: Accelerator, step_fn: Callable[[Any], Any], batch: Any) -> None:
    """Take so many steps on the claimed device, in the copy that is watched."""
    run, own = accelerator._run, present()
    run.losses = None  # what is traced is no loss
    session, setting = run.session, own.setting
    session.observer = own  # the run was made before anybody looked on
    _move(run, own, None if setting is None else setting.precision)
    made = sized(batch, setting)
    folder = accelerator.project_dir
    own.tell(
        **run_facts(run),
        batch_size=num_rows(made) or 0,
        output_dir="" if folder is None else str(folder),
    )
    for _ in range(NUM_UPDATES * session.cursor.accumulation.num_steps):
        step_fn(map_tensors(_placed(session), made))
    own.leave()


def _move(run: Run, own: TraceObserver, precision: str | None) -> None:
    """Give the run the claimed device: another backend, precision, and no moments yet."""
    session = run.session
    session.backend = probe.choose(None)
    session.device = device = session.backend.device(0)
    traces = session.backend.capabilities(device).traces
    session.end_step = session.cursor.end_step = session.backend.end_step if traces else None
    if precision is not None:
        session.revise("precision", precision, "the setting that is tried")
    session.precision = precisions.build(session.plan.precision.value, device.type)
    for model in run.models:
        inner = run.unwrap(model, keep_forward=False, keep_compiled=False)
        moved = {**move(inner, device), **claim_weights(inner, own.recorder.device)}
        cast_forward(inner, session.precision)
        for optimizer in run.optimizers:
            follow(optimizer.optimizer, moved)
    for optimizer in run.optimizers:
        optimizer.optimizer.state.clear()
        optimizer.guard = guard_for(optimizer.optimizer, session)


def _placed(session: Any) -> Callable[[Any], Any]:
    return lambda tensor: session.backend.place(tensor, session.device, non_blocking=False)
