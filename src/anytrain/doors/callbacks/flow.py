"""Ask for logs, evaluations, saves and the end, as the arguments' strategies say."""

from __future__ import annotations

from typing import Any

from anytrain.doors.callbacks.control import TrainerControl
from anytrain.doors.callbacks.hf import TrainerCallback
from anytrain.doors.callbacks.state import TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Turn the strategies of the arguments into requests, by steps or by epochs.

    The last step asks for an evaluation and a save of its own where these go by steps. A save
    strategy "best" is not asked for here: it hangs on what an evaluation finds.
    """

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for what falls due at this step, and for the end after the last."""
        step = state.global_step
        is_last = step >= state.max_steps
        if is_last:
            control.should_training_stop = True
        if (step == 1 and args.logging_first_step) or (
            args.logging_strategy == "steps" and step % state.logging_steps == 0
        ):
            control.should_log = True
        if args.eval_strategy == "steps" and args.eval_delay <= step:
            control.should_evaluate |= is_last or step % state.eval_steps == 0
        if args.save_strategy == "steps":
            control.should_save |= is_last or _falls_due(step, state.save_steps)
        return control

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for what goes by epochs."""
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        return control


def _falls_due(step: int, interval: int) -> bool:
    """Whether a save is due; an interval of 0 means only at the end."""
    return interval > 0 and step % interval == 0
