"""The shape of a callback as HF's Trainer users write it.

A subclass overrides the events it cares for. Each gets `args`, `state` and `control` in place,
and by name what is known then: model, processing_class, tokenizer, optimizer, lr_scheduler,
train_dataloader, eval_dataloader, and `logs` or `metrics` where there are some. It may set flags
of `control`, and return it; returning nothing is as good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from anytrain.core.errors import Unsupported

if TYPE_CHECKING:
    from anytrain.doors.callbacks.control import TrainerControl
    from anytrain.doors.callbacks.state import TrainerState


class ExportableState:
    """Something whose condition travels in a checkpoint as plain JSON values."""

    def state(self) -> dict[str, Any]:
        """Return {"args": what the constructor takes, "attributes": what is set afterwards}."""
        raise Unsupported(
            f"{type(self).__name__} does not say what of it to save.",
            why="an ExportableState is saved by what its state() returns, and it has none.",
            fix='define state() to return {"args": {...}, "attributes": {...}}.',
        )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Build one again from what `state` returned."""
        made = cls(**state.get("args", {}))
        for name, value in state.get("attributes", {}).items():
            setattr(made, name, value)
        return made


class TrainerCallback:
    """Watch a training run, and ask for things through the control object."""

    def on_init_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act when the Trainer has been built."""

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act before the first step of a training."""

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act when training is over, its results written."""

    def on_epoch_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act before the first batch of an epoch."""

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after the last batch of an epoch."""

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act before an optimizer step, all of its micro-batches still to come."""

    def on_substep_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after a micro-batch that is not the last of its step."""

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act when gradients are whole and clipped, before they are applied."""

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act when gradients have been applied, before they are cleared."""

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after an optimizer step."""

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after an evaluation; `metrics` holds its figures."""

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after a prediction; `metrics` holds its figures."""

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after a checkpoint."""

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after an entry was added to the log; `logs` holds it."""

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after a batch of an evaluation or a prediction."""

    def on_push_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act before a model goes to the Hub."""
