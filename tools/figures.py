"""Write down losses, norms and weights to the bit, and compare them with what was written before.

    python tools/figures.py write before.json
    python tools/figures.py compare before.json

For changes that move code and no numbers. Every case is a small training on the CPU: both doors,
float32 and bfloat16, one and two ranks, accumulated, with dropout, whole and resumed in the middle
of an epoch. The last bits depend on the processor, so compare on the host that wrote the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

DOORS = ("trainer", "accelerator", "own loop")
STEPS, STOP_AT = 10, 7
"""Optimizer steps of a case, and after how many its first life ends; an epoch has 5 or 6."""


def cases() -> dict[str, dict[str, Any]]:
    """Return what is trained, by name."""
    found = {}
    for door, precision, ranks, accumulation in product(DOORS, ("no", "bf16"), (1, 2), (1, 2)):
        name = f"{door}, {precision}, {ranks} ranks, accumulation {accumulation}"
        found[name] = {
            "door": door, "precision": precision, "ranks": ranks, "accumulation": accumulation,
        }  # fmt: skip
    return found


# -- one rank of one case ------------------------------------------------------------------------


def train(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a case in two lives, and return what it computed."""
    whole = _train(case, folder / "whole", STEPS)
    _train(case, folder / "resumed", STOP_AT)
    rest = _train(case, folder / "resumed", STEPS)
    return {"whole": whole, "resumed": rest}


def _train(case: dict[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 3)
    )
    draw = torch.Generator().manual_seed(3)
    rows = [
        {"x": torch.randn(12, generator=draw), "labels": torch.randint(3, (), generator=draw)}
        for _ in range(4 * 11)
    ]
    run = _trainer if case["door"] == "trainer" else _accelerator
    told = run(case, folder, model, rows, steps)
    state = {name: value.detach() for name, value in model.state_dict().items()}
    return {**told, "weights": {name: _hash(value) for name, value in state.items()}}


class _Seen:
    """Losses and norms as a run logs them."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.norms: list[str] = []

    def told(self) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms}


def _trainer(
    case: dict[str, Any], folder: Path, model: Any, rows: list[Any], steps: int
) -> dict[str, Any]:
    import torch

    from anytrain import Trainer, TrainerCallback, TrainingArguments

    seen = _Seen()

    class Note(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                seen.losses.append(float(logs["loss"]).hex())
                seen.norms.append(float(logs["grad_norm"]).hex())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == steps:
                control.should_training_stop = True

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            logits = self.inner(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    arguments = TrainingArguments(
        str(folder), use_cpu=True, bf16=case["precision"] == "bf16", max_steps=STEPS,
        per_device_train_batch_size=4 // case["ranks"], max_grad_norm=0.5, learning_rate=1e-2,
        gradient_accumulation_steps=case["accumulation"], logging_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="steps", save_steps=STOP_AT, logging_first_step=True,
    )  # fmt: skip
    trainer = Trainer(Net(), arguments, train_dataset=rows, callbacks=[Note()])
    begun = any(folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if begun else None)
    return seen.told()


def _accelerator(
    case: dict[str, Any], folder: Path, model: Any, rows: list[Any], steps: int
) -> dict[str, Any]:
    import torch

    from anytrain import Accelerator

    accelerator = Accelerator(
        cpu=True, mixed_precision=case["precision"], project_dir=folder,
        gradient_accumulation_steps=case["accumulation"],
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    loader = torch.utils.data.DataLoader(rows, batch_size=4 // case["ranks"], shuffle=True)
    prepared = accelerator.prepare(model, optimizer, loader, schedule)
    count, seen = _Count(), _Seen()
    accelerator.register_for_checkpointing(count)
    accelerator.resume()
    one = _whole_step(accelerator, prepared)
    if case["door"] == "own loop":
        one = _written_step(accelerator, prepared)
    while count.steps < steps:
        for batch in prepared[2]:
            loss, norm = one(batch)
            seen.losses.append(float(loss).hex())
            if norm is None:
                continue
            seen.norms.append(float(norm).hex())
            count.steps += 1
            if count.steps == STOP_AT:
                accelerator.save_state()
            if count.steps == steps:
                break
    accelerator.end_training()
    return seen.told()


def _loss_of(model: Any, batch: dict[str, Any]) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def _whole_step(accelerator: Any, prepared: Any) -> Any:
    return accelerator.step(_loss_of, max_grad_norm=0.5)


def _written_step(accelerator: Any, prepared: Any) -> Any:
    model, optimizer, _, schedule = prepared

    def step(batch: Any) -> tuple[Any, Any]:
        norm = None
        with accelerator.accumulate(model):
            loss = _loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return loss, norm

    return step


class _Count:
    """How many steps are done, kept in checkpoints."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def _hash(value: Any) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]


# -- all cases -----------------------------------------------------------------------------------


def compute(name: str, case: dict[str, Any]) -> list[Any]:
    """Train a case with its ranks, and return what each of them computed."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, __file__]
        if case["ranks"] > 1:
            ranks = str(case["ranks"])
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
            launch = [sys.executable, *torchrun, __file__]
        done = subprocess.run(
            [*launch, "rank", json.dumps(case), folder],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode != 0:
            sys.exit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
        files = sorted(Path(folder).glob("rank-*.json"))
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["write", "compare", "rank"])
    parser.add_argument("words", nargs="+")
    asked = parser.parse_args()
    if asked.what == "rank":
        folder, rank = Path(asked.words[1]), os.environ.get("RANK", "0")
        found = train(json.loads(asked.words[0]), folder)
        folder.joinpath(f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        return
    figures = {}
    for name, case in cases().items():
        figures[name] = compute(name, case)
        print(name, flush=True)
    file = Path(asked.words[0])
    if asked.what == "write":
        file.write_text(json.dumps(figures, indent=1), encoding="utf-8")
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    apart = [name for name in before if figures.get(name) != before[name]]
    print(f"{len(before) - len(apart)} of {len(before)} cases are the same to the bit.")
    sys.exit("\n".join(["These differ:", *apart]) if apart else 0)


if __name__ == "__main__":
    main()
