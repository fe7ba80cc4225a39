"""A training that is only watched: two steps, one batch of evaluation, and nothing is written."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from anytrain.core.observer import Observer
from anytrain.doors.callbacks.hf import TrainerCallback
from anytrain.doors.described import run_facts
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.data.grouped import quick_lengths

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

NUM_STEPS = 2
_QUIET: dict[str, Any] = {
    "push_to_hub": False,
    "disable_tqdm": True,
    "save_on_signal": False,
    "use_cpu": False,
    "step_engine": "eager",
    "resume_from_checkpoint": None,
}
"""What would reach beyond the rehearsal's folder, or choose another device or step.

The strategies, what is best and the trackers stay the user's: callbacks read them, and refuse what
does not go together. That nothing comes of them is seen to where they are acted on.
"""


def arguments(args: TrainingArguments, observer: Observer) -> TrainingArguments:
    """Return the arguments with another folder; what callbacks decide by is as it was given."""
    observer.tell(output_dir=str(args.output_dir or ""), buckets=str(args.length_buckets or "off"))
    quiet = copy.copy(args)
    for name, value in {**_QUIET, "output_dir": observer.folder}.items():
        setattr(quiet, name, value)
    return quiet


def shorten(trainer: Trainer, observer: Observer) -> None:
    """Let the training that begins end after two steps and one batch of evaluation."""
    args = trainer.args
    facts = {
        **run_facts(trainer._run),
        "accumulation": args.gradient_accumulation_steps,  # the feed's: the run has none
        "batch_size": args.train_batch_size,
        "lengths": _lengths(trainer.train_dataset),
    }
    observer.tell(**facts)
    trainer.add_callback(_LeaveAfter(trainer, observer))


def _lengths(dataset: Any) -> tuple[int, ...]:
    try:
        return tuple(quick_lengths(dataset) or ())
    except (TypeError, AttributeError):  # a stream has none
        return ()


class _LeaveAfter(TrainerCallback):
    """Evaluate one batch after the second step, or the last, and leave.

    It comes last, so it can take back what the callbacks before it, ours and the user's, ask for.
    """

    def __init__(self, trainer: Trainer, observer: Observer) -> None:
        self._trainer, self._observer = trainer, observer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the books before anything else runs."""
        _take_back(control)
        if state.global_step < min(NUM_STEPS, state.max_steps):
            return
        trainer, observer = self._trainer, self._observer
        observer.end_steps()
        if trainer.eval_dataset is not None:
            if trainer.compute_metrics is not None:  # what it would compute from is not there
                trainer.compute_metrics = lambda *args, **kwargs: {}
            trainer.evaluate()
        observer.leave()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let nothing come of an epoch's end."""
        _take_back(control)


def _take_back(control: Any) -> None:
    control.should_log = control.should_evaluate = control.should_save = False
