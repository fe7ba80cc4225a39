"""What awaits a Trainer on devices that are not here, and what it tells where memory was full.

A preflight rehearses the training: two steps and one batch of evaluation are watched, and nothing
is written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anytrain.core.notices import give_notice
from anytrain.core.observer import Observer
from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.described import run_facts
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.data.grouped import quick_lengths
from anytrain.engine.prepared.model import move
from anytrain.engine.prepared.optimizer import follow
from anytrain.insight.preflight.fake_device.weights import claim_weights
from anytrain.insight.preflight.observer import present
from anytrain.insight.preflight.report import Report, foretold
from anytrain.insight.preflight.run import Start, preflight_of
from anytrain.insight.preflight.targets import parse_targets
from anytrain.insight.preflight.trace_process import trace_call
from anytrain.insight.preflight.units import size

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


def preflight(
    trainer: Trainer,
    targets: str | Sequence[str],
    num_processes: int | None,
    *,
    quick: bool,
    thorough: bool,
) -> Report:
    """Return what awaits this training on the targets."""
    words = (targets,) if isinstance(targets, str) else tuple(targets)
    return preflight_of(
        lambda target, setting: trace_call(target, lambda: _rehearse(trainer), setting),
        parse_targets(words),
        start=Start(num_processes or trainer.args.world_size),
        quick=quick,
        thorough=thorough,
    )


def was_split(trainer: Trainer, parts: int) -> None:
    """Tell that batches are cut from now on, and keep it in the run's record."""
    give_notice(
        f"A batch of {trainer.args.train_batch_size} does not fit the memory: it is computed in "
        f"{parts} parts from now on. What a step learns from stays the same.",
        stacklevel=4,
    )
    _note_full(trainer, f"in {parts} parts")


def was_checkpointed(trainer: Trainer, number: int, total: int) -> None:
    """Tell that blocks are computed again from now on, and keep it in the run's record."""
    which = "all" if number == total else str(number)
    give_notice(
        f"A batch of {trainer.args.train_batch_size} does not fit the memory: {which} of the "
        f"model's {total} repeated blocks are computed again in backward from now on. What a step "
        "learns stays the same.",
        stacklevel=7,
    )
    _note_full(trainer, f"{number} of {total} blocks computed again")


def _note_full(trainer: Trainer, instead: str) -> None:
    size, session = trainer.args.train_batch_size, trainer._session
    told = foretold(trainer.args.output_dir, session.backend.name)
    why = f"the memory was full with a batch of {size}{_missed(told, size)}"
    session.revise("batch", instead, why, step=trainer._progress.step)


def _missed(told: Mapping[str, Any] | None, batch_size: int) -> str:
    """Say what a preflight had foretold of a memory that is full, if one was made."""
    if told is None:
        return ""
    needed = size(int(told["needed_bytes"]))
    if told.get("fits") is None:
        return f"; a preflight had foretold {needed}"
    right = "fits" if told["fits"] else "does not fit"
    same = "" if told.get("batch_size") == batch_size else f" of {told.get('batch_size')}"
    return f"; a preflight had foretold {needed}, and that a batch{same} {right} {told['target']}"


def _rehearse(trainer: Trainer) -> None:
    """Begin the training anew on the claimed device, in the copy that is watched."""
    observer = present()
    trainer.args = rehearsed(trainer.args, observer)
    trainer._asked = None  # the device is another one: the session is opened again
    trainer._follow_arguments()
    trainer._new_run()
    moved = move(trainer.model, trainer._session.device)
    moved |= claim_weights(trainer.model, observer.recorder.device)  # of a CPU nothing had to move
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if optimizer is not None:
        optimizer.state.clear()
        follow(optimizer, moved)
    trainer.train()


def rehearsed(args: TrainingArguments, observer: Observer) -> TrainingArguments:
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
