"""A small run to save, and what to compare after a load. `from checkpoints import small_run`."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from anytrain.engine.checkpoint import Loaded, Snapshot
from anytrain.engine.checkpoint.encode import encode, to_json
from anytrain.engine.checkpoint.tensors import to_bytes


@dataclass
class SmallRun:
    """A model, its optimizer and a schedule, after some steps that depend on the seed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def snapshot(self, step: int, **changes: Any) -> Snapshot:
        contents: dict[str, Any] = {
            "step": step,
            "models": [self.model],
            "parts": {
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "counters": {"step": step, "seen": (step, {"epoch": 0})},
            },
            "rank_parts": {"rng": rng_state()},
            "meta": {"plan": {"precision": "no"}},
            "metrics": {"loss": 1.0 / (step + 1)},
        }
        return Snapshot(**{**contents, **changes})


def small_run(seed: int = 0) -> SmallRun:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return SmallRun(model, optimizer, scheduler)


def rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def same_bits(one: Any, other: Any) -> bool:
    """Whether two states are the same to the last bit."""
    return digest(one) == digest(other)


def fingerprint(loaded: Loaded) -> str:
    """Return one word for everything that a checkpoint gives back, to the last bit."""
    parts = {name: loaded.part(name) for name in loaded.part_names}
    models = [loaded.model(i) for i in range(loaded.num_models)]
    return digest([loaded.step, models, parts, loaded.meta, dict(loaded.metrics)])


def digest(state: Any) -> str:
    held = encode(state)
    digest = hashlib.blake2b(to_json(held.document))
    for name, tensor in sorted(held.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(to_bytes(tensor))
    return digest.hexdigest()


def hidden(root: Path) -> list[str]:
    """Return what saves have left lying about."""
    return sorted(p.name for p in root.iterdir() if p.name.startswith("."))
