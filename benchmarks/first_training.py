"""Show what a process's first trainings pay beside their steps: each slow step, and the end.

Trains a size of `anytrain bench glue` three times in one process: a few steps, as that program
does before its clock runs, then all of them, then all of them again.

    python benchmarks/first_training.py [--size bert-base] [--lengths 64,104] [--max_steps 0]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path

from anytrain import Trainer, TrainerCallback, TrainingArguments
from anytrain.recipes.bench import rows, task
from anytrain.recipes.bench.settings import SIZES, BenchSettings
from anytrain.recipes.glue.encode import Pad

WARM_UP = 4
SLOW = 5  # times the median


class Clock(TrainerCallback):
    """Note when the host is done with each step: on a GPU it runs ahead of the device."""

    def __init__(self) -> None:
        self.began, self.at = time.perf_counter(), []

    def on_step_end(self, args: object, state: object, control: object, **known: object) -> None:
        self.at.append(time.perf_counter())

    def tell(self, what: str) -> None:
        over = time.perf_counter()
        took = [b - a for a, b in zip([self.began, *self.at], self.at, strict=False)]
        usual = statistics.median(took)
        slow = [f"{n + 1}: {s * 1e3:.0f}" for n, s in enumerate(took) if s > SLOW * usual]
        print(
            f"{what}: {over - self.began:.2f} s, {len(took)} steps; slow ones, in ms: "
            f"{', '.join(slow) or 'none'}; after the last step {(over - self.at[-1]) * 1e3:.0f} ms",
            flush=True,
        )


def train(settings: BenchSettings, folder: Path, what: str, steps: int, lengths: str) -> None:
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            num_train_epochs=settings.epochs,
            max_steps=steps or -1,
            length_buckets=lengths,
            precision="auto",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        clock = Clock()
        trainer = Trainer(
            task.load_model(settings, folder),
            args,
            train_dataset=rows.load(folder, "train"),
            data_collator=Pad(token=0, multiple=8),
            callbacks=[clock],
        )
        clock.began = time.perf_counter()
        trainer.train()
        clock.tell(what)
        print(f"  {trainer.accelerator.plan.shapes.because}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="bert-base", choices=SIZES)
    parser.add_argument("--lengths", default="auto", help="auto, or lengths, separated by commas")
    parser.add_argument("--max_steps", type=int, default=0)
    asked = parser.parse_args()
    size = SIZES[asked.size]
    settings = BenchSettings(
        size=asked.size,
        model=None,
        data=None,
        length=size.length,
        batch_size=size.batch_size,
        epochs=size.epochs,
        learning_rate=size.learning_rate,
        max_steps=asked.max_steps,
        warm_up_steps=WARM_UP,
        cpu=False,
        shapes=(),
        shape_steps=(0, 0, 0),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows.write(settings, folder)
        task.write_model(settings, folder)
        for what, steps in (("warm-up", WARM_UP), ("first", 0), ("second", 0)):
            train(settings, folder, what, steps or asked.max_steps, asked.lengths)
            gc.collect()


if __name__ == "__main__":
    main()
