"""The child process of one contender: train, evaluate, measure steps, write what came of it.

    python -m anytrain.recipes.bench.child FOLDER prepare
    python -m anytrain.recipes.bench.child FOLDER NAME SEED BORN

FOLDER holds the settings, and after `prepare` the rows and the weights. BORN is the time when the
parent started this process.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from anytrain.core import environment
from anytrain.recipes.bench import figures, models, rows
from anytrain.recipes.bench.contenders import CONTENDERS, Contender
from anytrain.recipes.bench.settings import Settings, load
from anytrain.recipes.bench.task import Stopwatch, Task, Trained, evaluate, place

_PACKAGES = ("anytrain", "transformers", "accelerate", "lightning", "numpy")


class Child:
    """One contender with its settings, in a process of its own."""

    def __init__(self, folder: Path, contender: Contender, seed: int) -> None:
        self.folder, self.contender, self.seed = folder, contender, seed
        self.settings: Settings = load(folder / "settings.json")
        self.backend, self.device = place(self.settings)
        self.train_rows = rows.load(folder, "train")
        name, _, function = contender.run.partition(":")
        self.run = getattr(import_module(name), function)

    def task(self, num_steps: int, watch: Stopwatch | None = None) -> Task:
        """Return the training of all rows, over so many steps."""
        return Task(
            settings=self.settings,
            folder=self.folder,
            train=self.train_rows,
            precision=self.contender.precision,
            padding=self.contender.padding,
            seed=self.seed,
            num_steps=num_steps,
            batch_size=self.settings.batch_size,
            length=self.settings.length,
            backend=self.backend,
            device=self.device,
            watch=watch,
        )

    def measure(self, born_s: float) -> dict[str, Any]:
        """Warm up, train all of it, evaluate, and measure single steps."""
        first = figures.FirstStep(born_s, self.backend, self.device)
        if self.settings.warm_up_steps:
            self.run(self.task(self.settings.warm_up_steps, first))
            self._forget()
        task = self.task(self._num_steps())
        trained: Trained = self.run(task)
        peak = self.backend.memory(self.device).peak_bytes
        told: dict[str, Any] = {
            "precision": trained.precision,
            "seconds": task.seconds,
            "steps": task.num_steps,
            "samples_per_second": self._num_samples() / task.seconds,
            "first_step_s": first.after_s,
            "train_loss": trained.mean_loss,
            "peak_bytes": peak,
            "plan": trained.plan,
            **evaluate(task, trained.model, rows.load(self.folder, "eval")),
        }
        flops = self.flops(trained.model)
        del trained
        if flops:
            rate = figures.matmul_rate(self.backend, self.device)
            told |= {"matmul_rate": rate, "shapes": [self.steps(s, flops, rate) for s in flops]}
        return told

    def _num_steps(self) -> int:
        whole = -(-len(self.train_rows) // self.settings.batch_size) * self.settings.epochs
        return min(whole, self.settings.max_steps or whole)

    def _num_samples(self) -> int:
        epoch = -(-len(self.train_rows) // self.settings.batch_size)
        epochs, more = divmod(self._num_steps(), epoch)
        return epochs * len(self.train_rows) + more * self.settings.batch_size

    def flops(self, model: torch.nn.Module) -> dict[tuple[int, int], float]:
        """Return what a step of each shape that is asked for computes."""
        shapes = self.settings.shapes or ()
        return {shape: models.flops_per_step(model, *shape) for shape in shapes}

    def steps(
        self, shape: tuple[int, int], flops: dict[tuple[int, int], float], rate: float
    ) -> dict[str, Any]:
        """Measure steps whose batches all have one shape."""
        self._forget()
        clock = figures.StepClock(self.settings.shape_steps, self.backend, self.device)
        task = self.task(sum(self.settings.shape_steps), clock)
        task.batch_size, task.length = shape
        task.padding = "max"
        vocabulary = json.loads((self.folder / "config.json").read_text())["vocab_size"]
        count = task.batch_size * task.num_steps
        task.train = rows.filling(self.settings, count, task.length, vocabulary)
        self.run(task)
        idle: dict[str, float] = {}
        if clock.profiled:  # against steps that no profiler slowed down
            idle["idle"] = max(0.0, 1 - clock.profiled["busy_s"] / clock.step_s)
        return {
            "shape": f"{shape[0]}x{shape[1]}",
            "step_s": clock.step_s,
            "cpu_s": clock.cpu_s,
            "samples_per_second": shape[0] / clock.step_s,
            "matmul_share": flops[shape] / clock.step_s / rate,
            **clock.profiled,
            **idle,
        }

    def _forget(self) -> None:
        gc.collect()
        self.backend.release()


def prepare(folder: Path) -> dict[str, Any]:
    """Write rows and weights for all, and return what is known of the machine."""
    settings = load(folder / "settings.json")
    rows.write(settings, folder)
    models.write(settings, folder)
    backend, device = place(settings)
    found = backend.capabilities(device)
    return {
        "device": found.name,
        "backend": found.backend,
        "threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "parameters": _num_parameters(settings, folder),
        "rows": len(rows.load(folder, "train")),
        "variables": environment.relevant(),
    }


def _num_parameters(settings: Settings, folder: Path) -> int:
    return sum(parameter.numel() for parameter in models.load(settings, folder).parameters())


def _version(name: str) -> str:
    if name == "anytrain":
        from anytrain import __version__

        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def main(words: Sequence[str]) -> None:
    """Do what the parent asks, and leave the answer in the folder."""
    folder, name = Path(words[0]), words[1]
    if name == "prepare":
        told = prepare(folder)
    else:
        told = Child(folder, CONTENDERS[name], int(words[2])).measure(float(words[3]))
    (folder / "answer.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
