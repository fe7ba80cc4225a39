"""Seed generators, and give every rank the same ones."""

from __future__ import annotations

from typing import Any

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.utils.dataclasses import RNGType
from anytrain.doors.accelerator.states import set_seed, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]

__getattr__ = refused.module_getattr(__name__)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: Any = None) -> None:
    """Give every rank the main process's state of one generator."""
    synchronize_rng_states([rng_type or RNGType.TORCH], generator)
