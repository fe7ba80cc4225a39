"""The machines that a preflight can stand in for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A device that the run is meant for."""

    kind: str
    """cpu, cuda, mps, tpu or xla."""
    name: str
    """As it was asked for: "mps:16GB", "cuda:24GB", "tpu:v5e"."""
    memory_bytes: int | None
    """The whole memory; None where nobody said."""
    torch_version: str
    """The torch that will run there: this one's unless told otherwise."""
    num_devices: int = 1
