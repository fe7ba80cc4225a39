"""Show the way of one optimizer step through anytrain: files, functions, calls.

    python tools/step_path.py           the ordered distinct functions, one a line
    python tools/step_path.py --json    the same with the counts

Only anytrain's own frames are counted; the third step is traced, so that what is done once is over.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch.utils.data import DataLoader, TensorDataset

import anytrain
from anytrain import Accelerator

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
        return {
            "path": [f"{file} {name}" for file, name in dict.fromkeys(self.calls)],
            "calls": len(self.calls),
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


def main() -> None:
    """Print the path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object, counts included")
    told = trace_accelerator().told()
    if parser.parse_args().json:
        print(json.dumps(told))
        return
    print("\n".join(told.pop("path")))
    print(", ".join(f"{count} {name}" for name, count in told.items()))


if __name__ == "__main__":
    main()
