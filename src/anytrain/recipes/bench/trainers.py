"""Drive a Trainer: anytrain's and HF's take the same arguments, and are given the same."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from anytrain.recipes.bench.task import MAX_GRAD_NORM, Task


def train(
    task: Task,
    trainer: Any,
    arguments: Any,
    callback: Any,
    around: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    **more: Any,
) -> tuple[Any, float]:
    """Train with the classes of one library; return its trainer and the mean loss.

    `around` gives what the training runs in, from the trainer.
    """

    class Told(callback):  # type: ignore[misc]  # each library has a class of its own
        """Pass on that a step is done."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """Tell the task."""
            task.told()

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
            callbacks=[Told()] if task.watch is not None else None,
        )
        with around(made), task.timed():
            result = made.train()
    return made, float(result.training_loss)
