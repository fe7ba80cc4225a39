"""Seed, read and share random generators."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch

from anytrain.core.errors import BadInput
from anytrain.machine.backends import xla
from anytrain.machine.backends.base import Backend
from anytrain.machine.parallel.world import World


def seed_everything(seed: int, *, deterministic: bool = False) -> None:
    """Seed python, numpy, and torch on every device it knows."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise BadInput(
            f"Cannot seed with {seed!r}.",
            why="numpy takes whole numbers from 0 to 2**32 - 1.",
            fix="pass a seed in that range, such as 42.",
        )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # reaches cuda, mps and every registered device too
    xla.seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def share(
    kinds: Iterable[str],
    world: World,
    backend: Backend,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> None:
    """Give every rank the main process's generator states."""
    for kind in kinds:
        if kind == "torch":
            torch.set_rng_state(_from_main(torch.get_rng_state(), world, device))
        elif kind == "generator":
            if generator is not None:
                generator.set_state(_from_main(generator.get_state(), world, device))
        elif kind == device.type:
            state = backend.rng_state(device)
            if state is not None:
                backend.restore_rng(device, _from_main(state, world, device))
        else:
            raise BadInput(
                f"Cannot synchronize the random generator {kind!r}.",
                why=f"the ones known here are 'torch', 'generator' and {device.type!r}.",
                fix='pass rng_types=["generator"] or leave it out.',
            )


def _from_main(state: torch.Tensor, world: World, device: torch.device) -> torch.Tensor:
    return world.broadcast(state.to(device)).cpu()
