"""The peers as contenders, each used as its own documentation shows.

The only file of anytrain that names accelerate and lightning.
"""

from __future__ import annotations

from typing import Any

import torch

from anytrain.recipes.bench import trainers
from anytrain.recipes.bench.task import MAX_GRAD_NORM, Task, Trained


def hf_trainer(task: Task) -> Trained:
    """Train with transformers' Trainer."""
    import transformers

    more: dict[str, Any] = {} if task.precision == "fp32" else {task.precision: True}
    made, loss = trainers.train(
        task,
        transformers.Trainer,
        transformers.TrainingArguments,
        transformers.TrainerCallback,
        **more,
    )
    return Trained(made.model, loss, task.precision)


def accelerate_loop(task: Task) -> Trained:
    """Train in a hand-written loop with HF Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=task.precision, cpu=task.settings.cpu)
    model = task.model()
    made = task.optimizer(model)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, made, task.loader(), task.schedule(made)
    )

    def step(batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    loss = task.run(loader, step)
    return Trained(accelerator.unwrap_model(model), loss, task.precision)


def fabric_loop(task: Task) -> Trained:
    """Train in a hand-written loop with Lightning Fabric."""
    from lightning.fabric import Fabric

    kind = "cpu" if task.settings.cpu else "auto"
    fabric = Fabric(accelerator=kind, devices=1, precision=f"{task.precision}-mixed")
    plain = task.model()
    made = task.optimizer(plain)
    model, optimizer = fabric.setup(plain, made)
    loader, schedule = fabric.setup_dataloaders(task.loader()), task.schedule(made)

    def step(batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    loss = task.run(loader, step)
    return Trained(plain, loss, task.precision)
