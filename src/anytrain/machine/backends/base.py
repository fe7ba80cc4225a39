"""What every vendor's file offers.

INVARIANT: a vendor's API is named in its own file and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from anytrain.core.facts import Capabilities, Found, MemoryUse, NotFound
from anytrain.core.plan import Wishes


class Lane(Protocol):
    """A copy stream: copies to the device run on it while the device computes."""

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy; return the copy, which nobody may read before it has arrived."""

    def sent(self) -> Callable[[], None]:
        """Return what lets the device wait for all that was sent before; the host never waits."""


class Backend(Protocol):
    """A kind of device: how to find it, start it, fill it and read it."""

    @property
    def name(self) -> str:
        """The word users say: cpu, cuda, mps, tpu, xla, fake."""

    @property
    def process_group(self) -> str | None:
        """What torch.distributed calls its transport; None refuses a second process."""

    def probe(self) -> Found | NotFound:
        """Say whether it is there and why; never raise, never change a process's device."""

    def process_counts(self) -> tuple[int, ...]:
        """Return the process counts that this host can launch, smallest first."""

    def launch_environment(self, num_processes: int, wishes: Wishes) -> Mapping[str, str]:
        """Return the variables a child needs before its runtime loads."""

    def device(self, local_rank: int) -> torch.device:
        """Return the device of this host's `local_rank`, and make it the current one."""

    def capabilities(self, device: torch.device) -> Capabilities:
        """Find out what the device computes in, by computing."""

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        """Return the tensor on the device, in a dtype the device has."""

    def lane(self, device: torch.device) -> Lane | None:
        """Return a copy stream; None where copies are in the order of what is computed."""

    def end_step(self) -> None:
        """Mark the end of an optimizer step; torch_xla cuts its graph here."""

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all it was given."""

    def is_idle(self, device: torch.device) -> bool:
        """Whether the device has nothing left to do; without waiting. True where none can tell."""

    def memory(self, device: torch.device) -> MemoryUse:
        """Return bytes in use, at the peak, and in all."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the error means that this device's memory is full."""

    def explain(self, error: BaseException) -> str | None:
        """Return what this vendor's error means in plain words, where more can be said."""

    def release(self) -> None:
        """Give cached memory back to the device."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """Return the device's generator state as a host tensor; None where it has none."""

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        """Set what `rng_state` returned."""

    def compilations(self) -> int | None:
        """Return how many graphs were compiled so far; None where nothing compiles."""
