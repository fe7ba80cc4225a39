"""Measure how long a training loop is stopped by a save, for a model of 100 million parameters.

Each contender trains the same model with AdamW in a process of its own, on the same machine, one
after the other, and saves weights and optimizer (1.2 GB) now and then. "Stopped" is the time from
the wish to save until the loop may take its next step; "slower" is what the steps that follow lose
while a save is written behind them, all together.

    python benchmarks/saving.py [--device cpu] [--saves 4] [--folder DIR] [--output DIR]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

WIDTH, DEPTH, BATCH = 2048, 24, 8
QUIET_STEPS = 4


class Tower(nn.Module):
    """Linear layers, 100.7 million parameters in all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = inputs
        for layer in self.layers:
            found = torch.relu(layer(found))
        return {"loss": (found - labels).square().mean()}


def make(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Return the model, its optimizer, and one training step."""
    torch.manual_seed(0)
    model = Tower().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # as HF Trainer does
    batch = torch.randn(BATCH, WIDTH, device=device)

    def step() -> None:
        model(batch, batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(action: Callable[[], object], device: torch.device) -> float:
    settle(device)
    start = time.perf_counter()
    action()
    settle(device)
    return time.perf_counter() - start


class Loop:
    """A training that saves now and then; what is measured goes to `stopped` and `slower`."""

    def __init__(self, step: Callable[[], None], device: torch.device, saves: int) -> None:
        self.step, self.device, self.saves = step, device, saves
        self.stopped: list[float] = []
        self.slower: list[float] = []
        self.behind: list[float] = []

    def run(self, save: Callable[[int], object], is_done: Callable[[], bool]) -> dict[str, object]:
        self.step()
        quiet = statistics.median(timed(self.step, self.device) for _ in range(QUIET_STEPS))
        for number in range(self.saves):
            self.stopped.append(timed(lambda n=number: save(n), self.device))
            began, lost = time.perf_counter(), 0.0
            while not is_done():
                lost += timed(self.step, self.device) - quiet
            self.slower.append(max(lost, 0.0))
            self.behind.append(time.perf_counter() - began)
            for _ in range(2):
                self.step()
        return {
            "step": quiet,
            "stopped": self.stopped,
            "slower": self.slower,
            "behind": self.behind,
        }


def with_torch_save(device: torch.device, folder: Path, saves: int) -> dict[str, object]:
    model, optimizer, step = make(device)
    path = folder / "all.pt"

    def save(number: int) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    return Loop(step, device, saves).run(save, lambda: True)


def with_anytrain(
    device: torch.device, folder: Path, saves: int, blocking: bool
) -> dict[str, object]:
    from anytrain import Accelerator, ProjectConfiguration

    model, optimizer, _ = make(device)
    keep = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=device.type == "cpu", project_dir=folder, project_config=keep)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = torch.randn(BATCH, WIDTH, device=device)

    def step() -> None:
        accelerator.backward(model(batch, batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()

    saved = Path()

    def save(number: int) -> None:
        nonlocal saved
        saved = Path(accelerator.save_state(blocking=blocking))

    # A save is done when the one before it is gone too: the next must not wait for that.
    found = Loop(step, device, saves).run(
        save, lambda: saved.exists() and len(os.listdir(saved.parent)) == 1
    )
    accelerator.end_training()
    return found


def with_dcp(device: torch.device, folder: Path, saves: int, cached: bool) -> dict[str, object]:
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer, step = make(device)
    more = {"async_stager": BlockingAsyncStager(cache_staged_state_dict=True)} if cached else {}
    future = None

    def save(number: int) -> None:
        nonlocal future
        if future is not None:
            future.result()
        shutil.rmtree(folder / f"step-{number - 2}", ignore_errors=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        future = dcp.async_save(state, checkpoint_id=folder / f"step-{number}", **more)

    found = Loop(step, device, saves).run(save, lambda: future.done())
    dist.destroy_process_group()
    return found


def with_trainer(device: torch.device, folder: Path, saves: int) -> dict[str, object]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    stopped: list[float] = []
    steps: list[float] = []

    class Timed(Trainer):
        def _save_checkpoint(self, *args: object, **kwargs: object) -> None:
            stopped.append(
                timed(lambda: super(Timed, self)._save_checkpoint(*args, **kwargs), device)
            )

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            settle(device)
            self.began = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            settle(device)
            steps.append(time.perf_counter() - self.began)

    torch.manual_seed(0)
    each = QUIET_STEPS
    rows = [{"inputs": torch.randn(WIDTH), "labels": torch.randn(WIDTH)} for _ in range(BATCH)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=each * saves,
        save_steps=each,
        save_strategy="steps",
        save_total_limit=1,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=device.type == "cpu",
        remove_unused_columns=False,
    )
    Timed(Tower(), arguments, train_dataset=rows, callbacks=[Steps()]).train()
    nothing = [0.0] * len(stopped)
    return {
        "step": statistics.median(steps),
        "stopped": stopped[:saves],
        "slower": nothing,
        "behind": nothing,
    }


CONTENDERS: dict[str, Callable[[torch.device, Path, int], dict[str, object]]] = {
    "torch.save": with_torch_save,
    "HF Trainer": with_trainer,
    "torch DCP async_save": lambda d, f, n: with_dcp(d, f, n, cached=False),
    "torch DCP async_save, cached staging": lambda d, f, n: with_dcp(d, f, n, cached=True),
    "anytrain save_state()": lambda d, f, n: with_anytrain(d, f, n, blocking=True),
    "anytrain save_state(blocking=False)": lambda d, f, n: with_anytrain(d, f, n, blocking=False),
}
BASE, OURS = "HF Trainer", "anytrain save_state(blocking=False)"


def run_apart(name: str, options: argparse.Namespace) -> dict[str, object] | None:
    """Run one contender in a process of its own; None where it cannot run here."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        words = [sys.executable, __file__, "--only", name, "--device", options.device]
        words += ["--saves", str(options.saves), "--folder", folder]
        done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: left out, {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, dict[str, object]]) -> list[str]:
    base = statistics.median(results[BASE]["stopped"][1:]) if BASE in results else None
    lines = [
        "| one save of 1.2 GB | loop stopped, first save | later saves, median | lowest to highest "
        "| of HF Trainer's | steps slower meanwhile | written behind for |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        first, *later = found["stopped"]
        typical = statistics.median(later)
        share = f"{100 * typical / base:.1f} %" if base else "-"
        slower, behind = (statistics.median(found[key][1:]) for key in ("slower", "behind"))
        lines.append(
            f"| {name} | {first:.3f} s | {typical:.3f} s | {min(later):.3f} to {max(later):.3f} s "
            f"| {share} | {slower:.2f} s | {behind:.2f} s |"
        )
    return lines


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("anytrain", "transformers", "accelerate", "safetensors"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def hardware(device: torch.device, folder: str | None) -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    found: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "filesystem": filesystem(Path(folder or tempfile.gettempdir())),
        "load average at the end": round(os.getloadavg()[0], 2),
        "nice": os.nice(0),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def filesystem(folder: Path) -> str:
    """Return the kind of filesystem that a folder lies on."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    rows = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    above = [row for row in rows if folder.resolve().is_relative_to(row[0])]
    return max(above, key=lambda row: len(row[0]))[1] if above else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--saves", type=int, default=4, help="at least 2; the first warms up")
    parser.add_argument("--folder", help="where the checkpoints go; by default a temporary one")
    parser.add_argument("--output", type=Path, help="folder for saving-DEVICE.md")
    parser.add_argument("--only", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.only:
        print(json.dumps(CONTENDERS[options.only](device, Path(options.folder), options.saves)))
        return
    runs = {name: run_apart(name, options) for name in CONTENDERS}
    results = {name: found for name, found in runs.items() if found is not None}
    lines = table(results)
    print("\n".join(lines))
    if options.output:
        facts = {**hardware(device, options.folder), **versions(), "saves": options.saves}
        text = "# Time a training loop is stopped by a save\n\n" + "\n".join(lines) + "\n\n"
        text += "100.7 million parameters in float32 with AdamW's state: 1.2 GB a save. Each "
        text += "contender trains in a process of its own, one after the other. anytrain and DCP "
        text += "wait until the bytes are on the disk before a save counts as done; torch.save and "
        text += "HF Trainer do not. `benchmarks/saving.py`.\n\n"
        text += "```json\n" + json.dumps(facts, indent=2) + "\n```\n"
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"saving-{device.type}.md").write_text(text)


if __name__ == "__main__":
    main()
