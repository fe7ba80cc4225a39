"""How long a training is, and where a saved one stands in it."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from anytrain.core.errors import BadInput, Notice
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.loop import Progress


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
) -> Progress:
    """Return a training's length from its arguments; `saved` is the position it goes on from.

    Where the saved run had another batch size, accumulation or number of ranks, its steps count
    otherwise: what is left of the data is counted anew and added to the steps that were done.
    """
    check_end(args, has_end=num_batches is not None)
    if num_batches == 0:
        raise BadInput(
            "Cannot train: there is not one batch.",
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
    if saved is not None and num_batches is not None and not progress.is_laid_out_like(saved):
        _lay_out_anew(progress, saved, args, per_epoch)
    return progress


def _lay_out_anew(
    progress: Progress, saved: Mapping[str, Any], args: TrainingArguments, per_epoch: int
) -> None:
    """Count what is left of the data in this run's steps, and tell."""
    done = saved["epoch"] * per_epoch + -(-progress.batches_in(saved) // progress.num_micro)
    left = max(0, progress.max_steps - done)
    if args.max_steps <= 0:
        progress.max_steps = saved["step"] + left
    else:
        progress.num_epochs = sys.maxsize
    warnings.warn(
        f"The saved run had {saved['samples_per_batch']} samples in a batch and "
        f"{saved['num_micro']} batches in a step, this one has {progress.samples_per_batch} and "
        f"{progress.num_micro}: after its {saved['step']} steps, {progress.max_steps} in all end "
        "the training, and the schedule with it.",
        Notice,
        stacklevel=5,
    )
