"""The 16 events as methods, for code that calls HF's callback handler itself."""

from __future__ import annotations

from typing import Any

from anytrain.core.events import EventKind
from anytrain.doors.callbacks.control import TrainerControl
from anytrain.doors.callbacks.hf import TrainerCallback
from anytrain.doors.callbacks.state import TrainerState


class EventCalls(TrainerCallback):
    """Pass a control object through every callback of an event, and return it."""

    def pass_through(
        self,
        kind: EventKind,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        extra: dict[str, Any],
    ) -> TrainerControl:
        """Let every callback of this event see and change `control`; return what came out."""
        raise NotImplementedError

    def on_init_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that the Trainer has been built."""
        return self.pass_through("init_end", args, state, control, kwargs)

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that training begins."""
        return self.pass_through("train_begin", args, state, control, kwargs)

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that training is over."""
        return self.pass_through("train_end", args, state, control, kwargs)

    def on_epoch_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that an epoch begins."""
        return self.pass_through("epoch_begin", args, state, control, kwargs)

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that an epoch is over."""
        return self.pass_through("epoch_end", args, state, control, kwargs)

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that a step begins."""
        return self.pass_through("step_begin", args, state, control, kwargs)

    def on_substep_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that a micro-batch is done and its step is not."""
        return self.pass_through("substep_end", args, state, control, kwargs)

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that gradients are ready."""
        return self.pass_through("pre_optimizer_step", args, state, control, kwargs)

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that gradients have been applied."""
        return self.pass_through("optimizer_step", args, state, control, kwargs)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that a step is done."""
        return self.pass_through("step_end", args, state, control, kwargs)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TrainerControl:
        """Tell what an evaluation found."""
        return self.pass_through("evaluate", args, state, control, {"metrics": metrics, **kwargs})

    def on_predict(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TrainerControl:
        """Tell what a prediction found."""
        return self.pass_through("predict", args, state, control, {"metrics": metrics, **kwargs})

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that a checkpoint was written."""
        return self.pass_through("save", args, state, control, kwargs)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TrainerControl:
        """Tell what was logged."""
        return self.pass_through("log", args, state, control, {"logs": logs, **kwargs})

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that a batch of an evaluation is done."""
        return self.pass_through("prediction_step", args, state, control, kwargs)

    def on_push_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell that a model is about to go to the Hub."""
        return self.pass_through("push_begin", args, state, control, kwargs)
