"""How long a training is, and where a saved one stands in it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.loop import Progress
from anytrain.engine.prepared.rounds import PlaceInRound


def check_end(args: TrainingArguments, *, has_end: bool) -> None:
    """Refuse a training that would never end."""
    if not has_end and args.max_steps <= 0:
        raise BadInput(
            "Cannot tell how long to train.",
            why="the training data has no length, and max_steps is not set.",
            fix="pass max_steps=, or give the data set a __len__.",
        )


def plan(
    args: TrainingArguments,
    num_batches: int | None,
    samples_per_batch: int,
    saved: Mapping[str, Any] | None = None,
    place: PlaceInRound | None = None,
) -> Progress:
    """Return a training's length from its arguments, and where it stands.

    A run goes on from what was `saved` of it, at the place in the data that its loader tells as
    `place`. Where it had another batch size, accumulation or number of ranks, its steps count
    otherwise: what is left of the data is counted anew and added to the steps that were done.
    """
    check_end(args, has_end=num_batches is not None)
    if num_batches == 0:
        raise BadInput(
            "Cannot train: there is no batch.",
            why="dataloader_drop_last leaves out the only batch, which is not full."
            if args.dataloader_drop_last
            else "the training data is empty.",
            fix="give more samples, a smaller per_device_train_batch_size, or keep the last batch.",
        )
    micro = args.gradient_accumulation_steps
    per_epoch = args.max_steps if num_batches is None else -(-num_batches // micro)
    max_steps = args.max_steps
    num_epochs = sys.maxsize if num_batches is None else -(-max_steps // per_epoch)
    if max_steps <= 0:
        max_steps = math.ceil(args.num_train_epochs * per_epoch)
        num_epochs = math.ceil(args.num_train_epochs)
    length = num_batches or max_steps * micro
    progress = Progress(max_steps, num_epochs, length, samples_per_batch, micro)
    if saved is not None and place is not None:
        _go_on(progress, saved, place, args, None if num_batches is None else per_epoch)
    return progress


def _go_on(
    progress: Progress,
    saved: Mapping[str, Any],
    place: PlaceInRound,
    args: TrainingArguments,
    per_epoch: int | None,
) -> None:
    """Stand where the saved run stood, as far from the end as the data is."""
    progress.step, progress.epoch = saved["step"], saved["epoch"]
    progress.batch, left = place.batches, place.left
    if per_epoch is None:  # nobody knows how long an epoch is: it is as long as the run
        left = max(0, args.max_steps - progress.step) * progress.num_micro
    elif left == 0:
        progress.batch = progress.batches_per_epoch
    same, surplus = progress.is_laid_out_like(saved), saved.get("surplus")
    if same and (surplus is None or per_epoch is None):
        progress.this_epoch, progress.surplus = saved.get("this_epoch"), surplus
        return
    if left and progress.batch + left != progress.batches_per_epoch:
        progress.this_epoch = progress.batch + left
    if args.max_steps > 0 or per_epoch is None:
        progress.num_epochs, progress.surplus = sys.maxsize, 0
    elif same:
        progress.surplus = surplus
        progress.max_steps += surplus or 0
    else:
        in_all = progress.step + _steps_left(progress, place, args.num_train_epochs, per_epoch)
        progress.surplus = in_all - progress.max_steps
        progress.max_steps = in_all
    if not same:
        _tell_laid_out_anew(progress, saved)


def _steps_left(progress: Progress, place: PlaceInRound, num_epochs: float, per_epoch: int) -> int:
    """Return how many steps the rest of the data makes; a short last one of an epoch is one."""
    here = -(-(place.left or 0) // progress.num_micro)
    whole = int(num_epochs)
    part = math.ceil((num_epochs - whole) * per_epoch)  # of a last epoch that is not gone through
    if progress.epoch < whole:
        return here + (whole - progress.epoch - 1) * per_epoch + part
    missing = num_epochs - progress.epoch - (place.share or 0.0)
    return min(here, max(0, math.ceil(missing * per_epoch - 1e-9)))


def _tell_laid_out_anew(progress: Progress, saved: Mapping[str, Any]) -> None:
    give_notice(
        f"The saved run had {saved['samples_per_batch']} samples in a batch and "
        f"{saved['num_micro']} batches in a step, this one has {progress.samples_per_batch} and "
        f"{progress.num_micro}. It is at step {saved['step']}, and the training and its schedule "
        f"end at step {progress.max_steps}.",
        stacklevel=6,
    )
