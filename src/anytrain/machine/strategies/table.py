"""The strategies by name.

To add one: a file here, a row below, and in core/plan.py when it is chosen and why. One that splits
tensors among ranks also needs the files of checkpoints to hold parts (engine/checkpoint/snapshot.py
refuses such parts by name).
"""

from __future__ import annotations

from typing import Any

import torch

from anytrain.machine.parallel.world import World
from anytrain.machine.strategies.base import Strategy
from anytrain.machine.strategies.ddp import DDP
from anytrain.machine.strategies.local_sgd import LocalSGD
from anytrain.machine.strategies.solo import Solo
from anytrain.machine.strategies.spmd import Spmd

TABLE: dict[str, Any] = {
    "solo": Solo,
    "ddp": DDP,
    "spmd": Spmd,
    "local_sgd": LocalSGD,
}


def build(name: str, world: World, device: torch.device, **options: Any) -> Strategy:
    """Return the strategy of that name for the ranks of a world."""
    made: Strategy = TABLE[name](world, device, **options)
    return made
