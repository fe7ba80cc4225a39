"""Show the way of one optimizer step through anytrain: files, functions, calls.

    python tools/step_path.py            the ordered distinct functions, one a line
    python tools/step_path.py trainer    the same through Trainer, less what its collator does
    python tools/step_path.py --json     with the counts, as JSON

Only anytrain's own frames are counted; the third step is traced, so that what is done once is over.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

import anytrain
from anytrain import Accelerator, ProgressCallback, Trainer, TrainingArguments
from anytrain.core.events import Event, Request

HOME = str(Path(anytrain.__file__).parent) + "/"


@dataclass
class Trace:
    """The calls into anytrain, in order."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call, if it is one of ours and has a name."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME) and code.co_name[0] != "<":
            self.calls.append((code.co_filename.removeprefix(HOME), code.co_name))

    def told(self) -> dict[str, object]:
        """Return the path and its counts."""
        files = [file for file, _ in self.calls]
        path = [f"{file} {name}" for file, name in dict.fromkeys(self.calls)]
        return {
            "path": path,
            "calls": len(self.calls),
            "functions": len(path),
            "files": len(set(files)),
            "switches": sum(a != b for a, b in zip(files, files[1:], strict=False)),
        }


def trace_accelerator() -> Trace:
    """Trace one step of a user's own loop: batch, forward, backward, update, schedule, zero."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    rows = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=8), schedule
    )
    batches = iter(loader)
    trace = Trace()
    for step in range(3):
        sys.setprofile(trace if step == 2 else None)
        features, target = next(batches)
        loss = torch.nn.functional.mse_loss(model(features), target)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        sys.setprofile(None)
    accelerator.end_training()
    return trace


class Net(torch.nn.Linear):
    """A model that returns its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a regression."""
        return {"loss": torch.nn.functional.mse_loss(super().forward(x), labels)}


class Between:
    """Trace from the end of one step to the end of the next."""

    watches = ("step_end",)

    def __init__(self) -> None:
        self.trace = Trace()

    def after(self, event: Event) -> frozenset[Request]:
        """Switch the trace on after the second step and off after the third."""
        sys.setprofile(self.trace if event.step == 2 else None)
        return frozenset()


def trace_trainer() -> Trace:
    """Trace one step of the Trainer's loop, with no callback but the flow's and this one."""
    watcher = Between()
    rows = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=4, save_strategy="no", use_cpu=True)
        trainer = Trainer(Net(8, 1), arguments, train_dataset=rows, callbacks=[watcher])
        trainer.remove_callback(ProgressCallback)
        trainer.data_collator = default_collate
        trainer.train()
    return watcher.trace


def main() -> None:
    """Print the path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("door", nargs="?", default="accelerator", help="accelerator or trainer")
    parser.add_argument("--json", action="store_true", help="one JSON object, counts included")
    asked = parser.parse_args()
    told = (trace_trainer() if asked.door == "trainer" else trace_accelerator()).told()
    if asked.json:
        print(json.dumps(told))
        return
    print("\n".join(told.pop("path")))
    print(", ".join(f"{count} {name}" for name, count in told.items()))


if __name__ == "__main__":
    main()
