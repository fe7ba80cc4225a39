"""Small runs to compare: real ones, and ones written by hand.

Import it as `import diffed_runs`; tests/ is on the path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from equivalence import twins

EVIL = "</script><img src=x onerror=alert(1)>\"'`&\u2028"


def train(folder: Path, **given: Any) -> Path:
    """Train a tiny regression there."""
    given = {"num_train_epochs": 3, "logging_steps": 1, "eval_strategy": "epoch", **given}
    trainer = twins.build(
        twins.OURS,
        folder,
        model=twins.regression(),
        train_dataset=twins.points(64),
        eval_dataset=twins.points(16),
        **given,
    )
    trainer.train()
    return folder


def written(folder: Path, losses: dict[int, Any], word: str = "a", **start: Any) -> Path:
    """Write a run's record by hand; a word stands in all places that take one."""
    folder.mkdir(parents=True)
    facts = {
        "time": 1.0,
        "host": word,
        "arguments": {"learning_rate": 0.1, "note": word, word: 1},
        "git": {"commit": word, "branch": word, "is_dirty": True},
        "versions": {"torch": word},
        "hardware": {"device_name": word},
        "plan": {"step": {"value": word, "because": f"because {word}"}},
        "data": {"train": {"fingerprint": word}},
        **start,
    }
    record = {"format": 1, "name": word, "starts": [facts]}
    (folder / "run.json").write_text(json.dumps(record))
    lines = [{"step": step, "time": 1.0, "loss": loss, word: step} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder
