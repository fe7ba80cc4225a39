"""anytrain as a contender: the Trainer, and `accelerator.step` in a loop of one's own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from anytrain.doors.accelerator import Accelerator
from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments
from anytrain.recipes.bench import peers
from anytrain.recipes.bench.task import MAX_GRAD_NORM, BenchTask, Trained
from anytrain.recipes.glue import job


def trainer(task: BenchTask) -> Trained:
    """Train with the Trainer; with buckets, as `anytrain glue` does, also in what it draws.

    Padded to one length it computes all of it, as the peers that it is compared with do.
    """
    more: dict[str, Any] = {"trim_padding": task.padding != "max"}
    if task.padding == "buckets":
        more |= {"length_buckets": "auto", "around": _quick}
    made, loss = peers.train(
        task, Trainer, TrainingArguments, TrainerCallback, precision=_spelt(task), **more
    )
    return Trained(made.model, loss, *_decided(made.accelerator))


def _quick(made: Trainer) -> AbstractContextManager[Any]:
    job.take_quick_draws(made)
    return job.with_quick_draws(made)


def own_loop(task: BenchTask) -> Trained:
    """Train in a hand-written loop with the step that `accelerator.step` gives."""
    accelerator = Accelerator(mixed_precision=_spelt(task), cpu=task.settings.cpu)
    model = task.model()
    optimizer = task.optimizer(model)
    # Few shapes: multiples of 16 leave half a dozen of them.
    model, optimizer, loader, _ = accelerator.prepare(
        model, optimizer, task.loader(multiple=16), task.schedule(optimizer)
    )
    step = accelerator.step(_loss, max_grad_norm=MAX_GRAD_NORM)
    loss = task.run(loader, lambda batch: step(batch).loss)
    trained = Trained(accelerator.unwrap_model(model), loss, *_decided(accelerator))
    accelerator.end_training()
    return trained


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _spelt(task: BenchTask) -> str:
    return "no" if task.precision == "fp32" else task.precision


def _decided(accelerator: Accelerator) -> tuple[str, dict[str, str]]:
    plan = accelerator.plan
    reasons = {
        name: f"{choice.value} ({choice.because})" for name, choice in plan.reasons().items()
    }
    return plan.precision.value.replace("no", "fp32"), reasons
