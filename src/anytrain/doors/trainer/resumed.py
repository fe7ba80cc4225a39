"""Say where a resumed run is not as its checkpoint was: its arguments, its data."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from anytrain.core.errors import Notice
from anytrain.engine.loop import Progress

_SETTLED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""What an optimizer's saved state holds."""


def tell_settled(arguments: Path, given: Any) -> None:
    """Give notice of arguments that differ from those that the checkpoint was made with."""
    try:
        saved = json.loads(arguments.read_text())
        kept = {name: saved[name] for name in _SETTLED if name in saved}
        schedule = saved.get("lr_scheduler_type")
    except (OSError, ValueError, TypeError, AttributeError):
        return  # another library's, or one that a subclass writes: there is nothing to compare
    changed = [
        f"{name} {value:g} (given: {getattr(given, name):g})"
        for name, value in kept.items()
        if value != getattr(given, name)
    ]
    if changed:
        _tell(
            f"The run goes on with its checkpoint's {', '.join(changed)}: an optimizer's settings "
            "are part of its state. To train on with others, begin a new run from the saved model."
        )
    now = getattr(given.lr_scheduler_type, "value", given.lr_scheduler_type)
    if schedule not in (None, now):
        _tell(
            f"The checkpoint's lr_scheduler_type is {schedule}, this run's is {now}: the learning "
            f"rate goes on where {now} is at this step, which is not where {schedule} left it."
        )


def tell_other_data(saved: int | None, now: int | None, progress: Progress) -> None:
    """Give notice of another number of training samples; None is a number that nobody knows."""
    if saved is None or now is None or saved == now:
        return
    step, in_all = progress.step, progress.max_steps
    left = (
        f"{in_all} steps in all end the training, and the schedule with it"
        if step < in_all
        else f"{in_all} steps would be all, so that nothing is left to train"
    )
    _tell(
        f"The saved run had {saved} training samples, this one has {now}: it goes on "
        f"{_place(progress)}. After the saved run's {step} steps, {left}."
    )


def _place(progress: Progress) -> str:
    if progress.batch >= progress.batches_per_epoch:
        return f"after epoch {progress.epoch + 1}"
    return (
        f"after batch {progress.batch} of the {progress.batches_per_epoch} of epoch "
        f"{progress.epoch + 1}, in another order: samples may come again in this epoch, and "
        "others not at all"
    )


def _tell(text: str) -> None:
    warnings.warn(text, Notice, stacklevel=6)
