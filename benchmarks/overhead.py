"""Measure the CPU time that each library adds to a training step on a tiny model.

Every contender runs the same loop on the same data in one process, in turns, so that a machine
that slows down slows all of them. The figure is the ratio to a raw PyTorch loop. A Trainer is
built anew every round, and its first steps are not counted.

    python benchmarks/overhead.py [--steps 400] [--rounds 15] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

Step = Callable[[], float]
WARM = 20  # steps of a Trainer that are not counted


def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, object]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    data = TensorDataset(torch.randn(8 * STEPS, 8), torch.randint(0, 2, (8 * STEPS,)))
    return model, optimizer, DataLoader(data, batch_size=8, shuffle=True), scheduler


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def timed(epoch: Callable[[], None]) -> Step:
    def run() -> float:
        start = time.process_time()
        epoch()
        return (time.process_time() - start) / STEPS * 1e6

    return run


def raw(clips: bool = False) -> Step:
    model, optimizer, loader, scheduler = make()

    def epoch() -> None:
        for batch in loader:
            loss = loss_of(model, batch)
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return timed(epoch)


def with_prepare(accelerator: object) -> Step:
    model, optimizer, loader, scheduler = accelerator.prepare(*make())

    def epoch() -> None:
        for batch in loader:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return timed(epoch)


def anytrain_loop() -> Step:
    from anytrain import Accelerator

    return with_prepare(Accelerator(cpu=True))


def anytrain_step() -> Step:
    from anytrain import Accelerator

    accelerator = Accelerator(cpu=True)
    _, _, loader, _ = accelerator.prepare(*make())
    step = accelerator.step(loss_of)

    def epoch() -> None:
        for batch in loader:
            step(batch)

    return timed(epoch)


def accelerate_loop() -> Step:
    from accelerate import Accelerator

    return with_prepare(Accelerator(cpu=True))


def fabric_loop() -> Step:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader, scheduler = make()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    def epoch() -> None:
        for batch in loader:
            loss = loss_of(model, batch)
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return timed(epoch)


class WithLoss(nn.Module):
    """The model as a Trainer wants it: it returns its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.inner(inputs), labels)}


class Window:
    """The processor time between a run's first steps and its last one."""

    def __init__(self) -> None:
        self.done, self.began, self.ended = 0, 0.0, 0.0

    def step(self) -> None:
        self.done += 1
        if self.done == WARM:
            self.began = time.process_time()
        elif self.done == STEPS:
            self.ended = time.process_time()

    def cost(self) -> float:
        return (self.ended - self.began) / (STEPS - WARM) * 1e6


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    inputs, labels = default_collate(rows)
    return {"inputs": inputs, "labels": labels}


def with_trainer(library: object) -> Step:
    """Time anytrain's or HF's Trainer: the same optimizer, clipping at 1 as both do by default."""

    def run() -> float:
        window = Window()

        class Told(library.TrainerCallback):
            def on_step_end(self, *args: object, **kwargs: object) -> None:
                window.step()

        inner, optimizer, loader, scheduler = make()
        with tempfile.TemporaryDirectory() as folder:
            args = library.TrainingArguments(
                folder,
                per_device_train_batch_size=8,
                max_steps=STEPS,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
                use_cpu=True,
            )
            trainer = library.Trainer(
                WithLoss(inner),
                args,
                train_dataset=loader.dataset,
                data_collator=collate,
                optimizers=(optimizer, scheduler),
                callbacks=[Told()],
            )
            trainer.remove_callback(library.PrinterCallback)
            trainer.train()
        return window.cost()

    return run


def anytrain_trainer() -> Step:
    import anytrain

    return with_trainer(anytrain)


def hf_trainer() -> Step:
    import transformers
    from transformers.trainer_callback import PrinterCallback

    transformers.PrinterCallback = PrinterCallback
    return with_trainer(transformers)


def lightning_trainer() -> Step:
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def run() -> float:
        window = Window()
        inner, optimizer, loader, scheduler = make()

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
                return loss_of(self.inner, batch)

            def configure_optimizers(self) -> dict[str, object]:
                each_step = {"scheduler": scheduler, "interval": "step"}
                return {"optimizer": optimizer, "lr_scheduler": each_step}

        class Told(lightning.Callback):
            def on_train_batch_end(self, *args: object, **kwargs: object) -> None:
                window.step()

        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            callbacks=[Told()],
        )
        trainer.fit(Module(), loader)
        return window.cost()

    return run


RAW, CLIPPING = "raw PyTorch loop", "raw PyTorch loop that clips"
CONTENDERS = {
    RAW: raw,
    CLIPPING: lambda: raw(clips=True),
    "anytrain Accelerator": anytrain_loop,
    "anytrain accelerator.step": anytrain_step,
    "HF Accelerate": accelerate_loop,
    "Lightning Fabric": fabric_loop,
    "anytrain Trainer": anytrain_trainer,
    "HF Trainer": hf_trainer,
    "Lightning Trainer": lightning_trainer,
}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("anytrain", "transformers", "accelerate", "lightning"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def facts(**more: object) -> str:
    """Return what a reader of the figures must know, as a block of JSON."""
    told = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load average at the end": round(os.getloadavg()[0], 2),
        **more,
        **versions(),
    }
    return "```json\n" + json.dumps(told, indent=2) + "\n```\n"


def built(names: list[str]) -> dict[str, Step]:
    """Return what runs each contender; a peer that is not installed is named and left out."""
    steps: dict[str, Step] = {}
    for name in names:
        try:
            steps[name] = CONTENDERS[name]()
        except ImportError as error:
            print(f"{name}: left out, {error}")
    return steps


def main() -> None:
    global STEPS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", help="names, separated by commas, beside the raw loop")
    options = parser.parse_args()
    STEPS = options.steps
    torch.set_num_threads(1)
    bases = [RAW, CLIPPING]
    steps = built([*bases, *options.only.split(",")] if options.only else list(CONTENDERS))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 2):
        for name, run in steps.items():
            cost = run()
            if turn >= 2:  # the first rounds warm up
                times[name].append(cost)
    rows = []
    for name, costs in times.items():
        base = times[CLIPPING if name == CLIPPING or name.endswith("Trainer") else RAW]
        ratios = [cost / raw_cost for cost, raw_cost in zip(costs, base, strict=True)]
        rows.append(
            (name, statistics.median(costs), statistics.median(ratios), min(ratios), max(ratios))
        )
    lines = [
        "| CPU time per step, tiny model | median us | ratio to raw | lowest | highest |",
        "|---|---|---|---|---|",
        *(f"| {n} | {us:.0f} | {r:.3f} | {lo:.3f} | {hi:.3f} |" for n, us, r, lo, hi in rows),
    ]
    print("\n".join(lines))
    if options.output:
        text = "# Overhead per step\n\n" + "\n".join(lines) + "\n\n"
        text += "Each step: loader, forward, loss, backward, AdamW, scheduler, zero_grad; batch 8, "
        text += (
            "three linear layers, float32, one thread. Trainers clip, and their ratios are to the "
            "loop that clips; the others do not. `benchmarks/overhead.py`.\n\n"
        )
        text += facts(threads=1, steps=STEPS, rounds=options.rounds)
        options.output.write_text(text)


STEPS = 400

if __name__ == "__main__":
    sys.exit(main())
