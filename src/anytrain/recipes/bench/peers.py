"""Train with the peers, each used as its own documentation shows, and with a plain PyTorch loop.

The only file of anytrain that names accelerate and lightning. It loads none of anytrain's doors, so
that their start is not counted as a peer's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from anytrain.recipes.bench.task import MAX_GRAD_NORM, BenchTask, Trained


def train(
    task: BenchTask,
    trainer: Any,
    arguments: Any,
    callback: Any,
    around: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    **more: Any,
) -> tuple[Any, float]:
    """Train with the classes of one library; return its trainer and the mean loss.

    `around` gives what the training runs in, from the trainer.
    """

    class Steps(callback):  # type: ignore[misc]  # each library has a class of its own
        """Pass on that a step is done."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """Tell the task."""
            task.step_done()

    settings = task.settings
    with tempfile.TemporaryDirectory(prefix="anytrain-bench-") as folder:
        args = arguments(
            output_dir=folder,
            per_device_train_batch_size=task.batch_size,
            learning_rate=settings.learning_rate,
            max_steps=task.num_steps,
            max_grad_norm=MAX_GRAD_NORM,
            seed=task.seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=settings.cpu,
            **more,
        )
        made = trainer(
            model=task.model(),
            args=args,
            train_dataset=task.train,
            # run_glue pads to multiples of 8 where it computes in half precision.
            data_collator=task.collator(multiple=1 if task.precision == "fp32" else 8),
            callbacks=[Steps()] if task.watch is not None else None,
        )
        with around(made), task.timed():
            result = made.train()
    return made, float(result.training_loss)


def hf_trainer(task: BenchTask) -> Trained:
    """Train with transformers' Trainer."""
    import transformers

    more: dict[str, Any] = {} if task.precision == "fp32" else {task.precision: True}
    made, loss = train(
        task,
        transformers.Trainer,
        transformers.TrainingArguments,
        transformers.TrainerCallback,
        **more,
    )
    return Trained(made.model, loss, task.precision)


def accelerate_loop(task: BenchTask) -> Trained:
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


def fabric_loop(task: BenchTask) -> Trained:
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


def raw_loop(task: BenchTask) -> Trained:
    """Train with nothing but torch."""
    model = task.model().to(task.device)
    optimizer = task.optimizer(model)
    schedule = task.schedule(optimizer)
    half = task.precision == "bf16"

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        placed = {n: tensor.to(task.device, non_blocking=True) for n, tensor in batch.items()}
        with torch.autocast(task.device.type, torch.bfloat16, enabled=half):
            out: Any = model(**placed)
        loss: torch.Tensor = out.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trained(model, task.run(task.loader(), step), task.precision)
