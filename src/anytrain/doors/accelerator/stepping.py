"""The part of `Accelerator` that takes a loss backward, and makes a whole step of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from anytrain.core.errors import BadInput, BadType, WrongOrder
from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.step_boundary import BetweenSteps
from anytrain.engine.assemble.steps import build_own_step
from anytrain.engine.step.step import Batch, StepOutput

LOOKS_EVERY = 200
"""Updates after which it is asked whether there was one that changed anything."""


class Stepping:
    """The backward of one batch; forward, backward and update as one function."""

    _run: Run
    _between: BetweenSteps
    clip_grad_norm_: Callable[..., torch.Tensor]
    _refuse_idle: Callable[..., None]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the loss's gradients, averaged over the batches of one update.

        Where there is a project_dir, the run's record has the curve of these losses: the mean
        over all that came since its last point, of all processes. Reports, `anytrain watch` and
        `anytrain diff` show it, unless you log a "loss" yourself.

        Args:
            loss: The loss: a tensor with one value.
            **kwargs: What goes to `loss.backward`, such as retain_graph.
        """
        if "gradient" not in kwargs:
            check_loss(loss)
        run = self._run
        found = run.session
        cursor = found.cursor
        if run.losses is not None:
            self._note_due()
            run.losses.add(loss)
        if found.world.is_watched:
            found.world.mark(cursor.updates, "backward")
        if cursor.updates and cursor.updates % LOOKS_EVERY == 0:
            self._refuse_idle(is_over=False)
        if cursor.accumulation.num_steps != 1:
            loss = loss / cursor.accumulation.num_steps
        if found.precision.scale is not None:
            loss = found.precision.scale(loss)
        loss.backward(**kwargs)
        if self._between.opening is not None:  # of a loop whose loader was not prepared
            self._between.open()

    def step(
        self,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        max_grad_norm: float | None = None,
    ) -> Callable[[Any], StepOutput]:
        """Return one function that runs the whole step on a batch: `out = step(batch)`.

        `loss_fn(model, batch)` returns the loss. The prepared model, optimizers and schedulers
        are used; accumulation and clipping are taken care of.

        Args:
            loss_fn: `f(model, batch)` that returns the loss.
            max_grad_norm: Clip the gradient's norm to this. None: do not clip.
        """
        if len(self._run.models) != 1 or not self._run.optimizers:
            raise WrongOrder(
                f"Cannot make a step from {len(self._run.models)} models and "
                f"{len(self._run.optimizers)} optimizers.",
                why="the step trains one prepared model with its prepared optimizers.",
                fix="call prepare(model, optimizer, ...) first; write the loop out for several.",
            )
        model, clip = self._run.models[0], None
        if max_grad_norm:
            clip = partial(self.clip_grad_norm_, list(model.parameters()), max_grad_norm)
        run, cursor = self._run, self._run.session.cursor
        step = build_own_step(run, loss_fn, self._backward_of_step, clip, max_grad_norm or 0.0)

        def take(batch: Any) -> StepOutput:
            """Train on one batch; the update comes when the accumulated step is complete."""
            ends = cursor.next_micro()
            num_steps = cursor.accumulation.num_steps
            output = step(Batch((batch,), ends=ends, num_in_step=num_steps))
            self._add_up(output.loss)
            return output

        return take

    def _backward_of_step(self, loss: torch.Tensor) -> None:
        # A recording must not hold the sum: of a step the loss is added up once it is through.
        losses, self._run.losses = self._run.losses, None
        try:
            self.backward(loss)
        finally:
            self._run.losses = losses

    def _add_up(self, loss: torch.Tensor) -> None:
        """Add a loss whose update, if it had one, is counted already."""
        if self._run.losses is not None:
            self._run.losses.add(loss)
            self._note_due()

    def _note_due(self) -> None:
        """Write a point of the curve if one is due; a prepared loader says by itself when."""
        losses, cursor = self._run.losses, self._run.session.cursor
        if losses is not None and (cursor.loader is None or cursor.stops is None):
            losses.note()


def check_loss(loss: Any) -> None:
    """Refuse what cannot be differentiated, saying which mistake it looks like."""
    if not isinstance(loss, torch.Tensor):
        hint = " A model of transformers gives None where its batch has no 'labels'."
        raise BadType(
            f"Cannot take the backward of a {type(loss).__name__}.",
            why="backward() needs the loss itself, a scalar tensor."
            + (hint if loss is None else ""),
            fix="pass `outputs.loss` (or what your loss function returns), not the model's "
            "output or a number read with .item().",
        )
    if loss.numel() != 1:
        raise BadInput(
            f"Cannot take the backward of a loss of shape {tuple(loss.shape)}.",
            why="only a scalar has one gradient.",
            fix="reduce it first: loss.mean() or loss.sum().",
        )
    if not loss.requires_grad:
        raise BadInput(
            "Cannot take the backward of a loss that requires no gradient.",
            why="it was computed under torch.no_grad(), was detached, or every parameter that it "
            "depends on is frozen.",
            fix="compute it from the model's output with gradients on, and check "
            "`requires_grad` of the parameters that should train.",
        )
