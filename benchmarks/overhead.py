"""Measure the CPU time that each library adds to a training step on a tiny model.

Every contender runs the same loop on the same data in one process, in turns, so that a machine
that slows down slows all of them. The figure is the ratio to a raw PyTorch loop.

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
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Step = Callable[[], float]


def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, object]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    data = TensorDataset(torch.randn(8 * STEPS, 8), torch.randint(0, 2, (8 * STEPS,)))
    return model, optimizer, DataLoader(data, batch_size=8), scheduler


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def timed(epoch: Callable[[], None]) -> Step:
    def run() -> float:
        start = time.process_time()
        epoch()
        return (time.process_time() - start) / STEPS * 1e6

    return run


def raw() -> Step:
    model, optimizer, loader, scheduler = make()

    def epoch() -> None:
        for batch in loader:
            loss = loss_of(model, batch)
            loss.backward()
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


CONTENDERS = {
    "raw PyTorch loop": raw,
    "anytrain Accelerator": anytrain_loop,
    "anytrain accelerator.step": anytrain_step,
    "HF Accelerate": accelerate_loop,
    "Lightning Fabric": fabric_loop,
}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("anytrain", "accelerate", "lightning"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    global STEPS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    STEPS = options.steps
    torch.set_num_threads(1)
    steps = {}
    for name, build in CONTENDERS.items():
        try:
            steps[name] = build()
        except ImportError as error:
            print(f"{name}: left out, {error}")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 2):
        for name, run in steps.items():
            cost = run()
            if turn >= 2:  # the first rounds warm up
                times[name].append(cost)
    base = times["raw PyTorch loop"]
    rows = []
    for name, costs in times.items():
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
        facts = {
            "date": datetime.date.today().isoformat(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": 1,
            "steps": STEPS,
            "rounds": options.rounds,
            **versions(),
        }
        text = "# Overhead per step\n\n" + "\n".join(lines) + "\n\n"
        text += "Each step: loader, forward, loss, backward, AdamW, scheduler, zero_grad; batch 8, "
        text += "three linear layers, float32, one thread. `benchmarks/overhead.py`.\n\n"
        text += "```json\n" + json.dumps(facts, indent=2) + "\n```\n"
        options.output.write_text(text)


STEPS = 400

if __name__ == "__main__":
    sys.exit(main())
