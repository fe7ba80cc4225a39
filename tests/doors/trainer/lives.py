"""A training that may be killed or terminated in the middle, and resumed.

    python lives.py <folder> [--kill STEP | --terminate STEP] [--resume]

Its end is in end.json: the history and the weights, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from anytrain.doors.callbacks import TrainerCallback  # noqa: E402  # beside the line above
from equivalence import twins  # noqa: E402  # found by the line above


class Signals(TrainerCallback):
    """Send this process a signal after a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Send it."""
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def live(folder: Path, *, resume: bool = False, signals: Signals | None = None) -> None:
    """Live once; the first rank writes down how it ended."""
    ran = twins.train(
        twins.OURS,
        folder,
        resume=True if resume else None,
        model=lambda: twins.regression(dropout=0.3),
        train_dataset=twins.points(22),
        save_strategy="steps",
        save_steps=4,
        logging_steps=3,
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        callbacks=[] if signals is None else [signals],
    )
    if os.environ.get("RANK", "0") == "0":
        weights = {name: weight.tolist() for name, weight in ran.weights.items()}
        found = {"history": ran.history, "weights": weights}
        (folder / "end.json").write_text(json.dumps(found))


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--terminate", type=int)
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()
    signals = None
    if asked.kill is not None:
        signals = Signals(asked.kill, signal.SIGKILL)
    if asked.terminate is not None:
        signals = Signals(asked.terminate, signal.SIGTERM)
    live(asked.folder, resume=asked.resume, signals=signals)


if __name__ == "__main__":
    main()
