"""A training that is only watched: two steps, one batch of evaluation, and nothing is written."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from anytrain.doors.callbacks.hf import TrainerCallback
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.data.grouped import quick_lengths
from anytrain.insight.preflight.watching import Observer, run_facts

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

NUM_STEPS = 2
_QUIET: dict[str, Any] = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_on_signal": False,
    "use_cpu": False,
    "step_engine": "eager",
    "resume_from_checkpoint": None,
}


def arguments(args: TrainingArguments, watch: Observer) -> TrainingArguments:
    """Return the arguments with another folder, and nothing that logs, saves or reports."""
    watch.tell(output_dir=str(args.output_dir or ""), buckets=str(args.length_buckets or "off"))
    quiet = copy.copy(args)
    for name, value in {**_QUIET, "output_dir": watch.folder}.items():
        setattr(quiet, name, value)
    return quiet


def shorten(trainer: Trainer, watch: Observer) -> None:
    """Let the training that begins end after two steps and one batch of evaluation."""
    args = trainer.args
    facts = {
        **run_facts(trainer._run),
        "accumulation": args.gradient_accumulation_steps,  # the feed's: the run has none
        "batch_size": args.train_batch_size,
        "lengths": _lengths(trainer.train_dataset),
    }
    watch.tell(**facts)
    trainer.add_callback(_LeaveAfter(trainer, watch))


def _lengths(dataset: Any) -> tuple[int, ...]:
    try:
        return tuple(quick_lengths(dataset) or ())
    except (TypeError, AttributeError):  # a stream has none
        return ()


class _LeaveAfter(TrainerCallback):
    """Evaluate one batch after the second step, and leave."""

    def __init__(self, trainer: Trainer, watch: Observer) -> None:
        self._trainer, self._watch = trainer, watch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the books before anything else runs."""
        if state.global_step < NUM_STEPS:
            return
        trainer, watch = self._trainer, self._watch
        watch.recorder.end_steps()
        if trainer.eval_dataset is not None:
            if trainer.compute_metrics is not None:  # what it would compute from is not there
                trainer.compute_metrics = lambda *args, **kwargs: {}
            trainer.evaluate()
        watch.leave()
