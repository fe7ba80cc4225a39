"""A small training as a user would write it, to be killed at any moment and started again.

A program: `python mortal.py FOLDER [options]`. Everything it does is written as one line of JSON
to FOLDER/marks, which outlives a SIGKILL: what it resumed from, each update with the samples it
consumed, when a save began, and when it had returned.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from anytrain import Accelerator, ProjectConfiguration, set_seed
from anytrain.engine.checkpoint import catalog, verify

WIDTH, LENGTH, CLASSES = 16, 4, 3


class Augmented(Dataset):
    """Fixed samples, changed at random whenever they are loaded."""

    def __init__(self, num_samples: int, poisoned: int | None) -> None:
        drawn = torch.Generator().manual_seed(11)
        self.samples = torch.randn(num_samples, LENGTH, WIDTH, generator=drawn)
        self.labels = torch.randint(0, CLASSES, (num_samples,), generator=drawn)
        self.poisoned = poisoned

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index] * (1 + 0.1 * random.random())
        sample = sample + 0.1 * torch.randn(sample.shape) + 0.01 * float(np.random.rand())
        if index == self.poisoned:
            sample = sample * float("nan")
        return {"id": index, "sample": sample, "label": self.labels[index]}


class Encoder(nn.Module):
    """One transformer layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, dim_feedforward=32, dropout=0.2, batch_first=True
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(sample).mean(1))


class Progress:
    """How many updates there were; saved with the rest."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


class Marks:
    """Lines in a file that several processes may share."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / "marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._file, b"\n")  # a kill may have torn the line before, at a page's end
        self.rank = 0

    def __call__(self, what: str, updates: int, **more: Any) -> None:
        told = {"what": what, "updates": updates, "rank": self.rank, "pid": os.getpid()}
        os.write(self._file, json.dumps({**told, "at": time.time(), **more}).encode() + b"\n")


def read_marks(folder: Path) -> list[dict[str, Any]]:
    path = folder / "marks"
    text = path.read_text() if path.exists() else ""
    # What follows the last line's end is still being written.
    return [
        json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if _is_whole(line)
    ]


def _is_whole(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save-epochs", action="store_true", help="save after epochs alone")
    parser.add_argument("--own-generator", action="store_true", help="shuffle with one of our own")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each batch takes")
    parser.add_argument("--behind", action="store_true", help="save in the background")
    parser.add_argument("--die", default="", help="WHAT:UPDATES, a mark after which to die")
    parser.add_argument("--no-room", default="", help="FROM:TO, updates without room for files")
    parser.add_argument("--full-disk", action="store_true", help="no room: fill the disk itself")
    parser.add_argument("--poisoned", type=int, help="a sample that is not a number")
    parser.add_argument("--poison-weights", type=int, help="the update after which they are NaN")
    parser.add_argument("--careless", action="store_true", help="keep something that is not saved")
    return parser.parse_args(words)


class Run:
    """One life of the training."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.progress = options, Progress()
        self.batches_of_this_life = 0
        self.marks = Marks(options.folder)
        self.marks("started", 0)
        set_seed(3)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=options.accumulation,
            project_dir=options.folder,
            project_config=ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2),
        )
        self.marks.rank = self.accelerator.process_index
        model = Encoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.95**n)
        data = Augmented(options.samples, options.poisoned)
        own = torch.Generator().manual_seed(5) if options.own_generator else None
        loader = DataLoader(
            data, batch_size=4, shuffle=True, num_workers=options.workers, generator=own
        )
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.accelerator.register_for_checkpointing(self.progress)

    def train(self) -> None:
        resumed = self.accelerator.resume()
        self.mark("begun", resumed=resumed)
        while self.loader.iteration < self.options.epochs:
            self.model.train()
            for batch in self.loader:
                self.step(batch)
            if self.options.save_epochs:
                self.save()
        self.save()
        self.accelerator.wait_for_everyone()
        self.mark("done", skipped=self.accelerator.num_skipped_steps)
        self.accelerator.end_training()

    def step(self, batch: dict[str, Any]) -> None:
        epoch = self.loader.iteration
        time.sleep(self.options.pause)
        with self.accelerator.accumulate(self.model):
            found = self.model(batch["sample"])
            loss = nn.functional.cross_entropy(found, batch["label"])
            if self.options.careless:
                self.batches_of_this_life += 1
                loss = loss * (1 + 0.01 * self.batches_of_this_life)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.mark("batch", ids=batch["id"].tolist(), epoch=epoch, loss=loss.item())
        if not self.accelerator.sync_gradients:
            return
        self.progress.updates += 1
        self.mark("update")
        self.trouble()
        if self.progress.updates % 3 == 0 and not self.options.save_epochs:
            self.save()

    def save(self) -> None:
        self.mark("saving")
        if self.options.no_room:
            first, last = map(int, self.options.no_room.split(":"))
            self.take_room(first <= self.progress.updates <= last)
        if self.options.behind:
            self.accelerator.save_state(blocking=False)
            self.mark("handed over")
        else:
            self.accelerator.save_state()
            self.take_room(False)
            self.mark("saved", whole=self.whole())

    def whole(self) -> list[int]:
        """Return the steps of the checkpoints that are whole."""
        if not self.accelerator.is_main_process:
            return []
        found = catalog.entries(self.options.folder / "checkpoints")
        return sorted(e.manifest.step for e in found if e.manifest and not verify(e.path))

    def trouble(self) -> None:
        """Bring about what the options ask for after this update."""
        if self.progress.updates == self.options.poison_weights:
            with torch.no_grad():
                self.accelerator.unwrap_model(self.model).head.weight[0, 0] = float("nan")

    def take_room(self, taken: bool) -> None:
        """Leave little room for files, or give it back."""
        if not self.options.no_room:
            return
        if self.options.full_disk:
            free = shutil.disk_usage(self.options.folder).free
            kept = self.options.folder / "taken"
            kept.write_bytes(bytes(max(0, free - 12_000)) if taken else b"")
        else:
            most = 2000 if taken else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    def mark(self, what: str, **more: Any) -> None:
        self.marks(what, self.progress.updates, **more)
        if f"{what}:{self.progress.updates}" == self.options.die:
            os.kill(os.getpid(), signal.SIGKILL)


def main(words: list[str] | None = None) -> None:
    torch.set_num_threads(1)
    Run(parse(words)).train()


if __name__ == "__main__":
    main(sys.argv[1:])
