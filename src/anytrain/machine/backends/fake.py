"""A device that is only claimed: it computes on the CPU and says what it was told to say.

It is never chosen unless named (`ANYTRAIN_DEVICE=fake`). Choices and refusals that depend on a
machine can be seen without that machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from anytrain.core.facts import Capabilities, Found, MemoryUse, NotFound
from anytrain.core.plan import Wishes
from anytrain.machine.backends.base import Lane

_MODEST = Capabilities(
    backend="fake",
    device="cpu",
    name="a stand-in that computes on the CPU",
    dtypes=("float32", "bfloat16"),
    process_group="gloo",
)


@dataclass(frozen=True)
class Fake:
    """A stand-in for any device, with the capabilities given."""

    index: int | None = None
    facts: Capabilities = _MODEST
    num_devices: int = 2
    compiled: Callable[[], int] | None = None
    """Returns how many graphs it claims to have compiled; None claims that nothing compiles."""
    name: ClassVar[str] = "fake"

    @property
    def process_group(self) -> str | None:
        """The transport that the given capabilities name."""
        return self.facts.process_group

    def probe(self) -> Found | NotFound:
        """Return Found, never to be taken unasked."""
        return Found(f"stands in for {self.facts.name}", self.num_devices, automatic=False)

    def process_counts(self) -> tuple[int, ...]:
        """Return up to one process per claimed device."""
        return tuple(range(1, self.num_devices + 1)) if self.process_group else (1,)

    def launch_environment(self, num_processes: int, wishes: Wishes) -> Mapping[str, str]:
        return {}

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def capabilities(self, device: torch.device) -> Capabilities:
        return self.facts

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        """Return the tensor, a float64 one as float32 where float64 is not claimed."""
        if tensor.dtype is torch.float64 and "float64" not in self.facts.dtypes:
            return tensor.to(device, torch.float32)
        return tensor.to(device)

    def lane(self, device: torch.device) -> Lane:
        """Return a way on which nothing is there before it has arrived."""
        return _SlowLane(self, device)

    def end_step(self) -> None:
        """Do nothing."""

    def synchronize(self, device: torch.device) -> None:
        """Do nothing."""

    def is_idle(self, device: torch.device) -> bool:
        return True

    def memory(self, device: torch.device) -> MemoryUse:
        """Return the claimed total; nothing is measured."""
        return MemoryUse(None, None, self.facts.memory_bytes)

    def is_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)

    def explain(self, error: BaseException) -> str | None:
        """Return None: a stand-in has no errors of its own."""
        return None

    def release(self) -> None:
        """Do nothing."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        return torch.get_rng_state()

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def compilations(self) -> int | None:
        return None if self.compiled is None else self.compiled()


class _SlowLane:
    """Copies that hold nothing but zeros until somebody waits for them."""

    def __init__(self, backend: Fake, device: torch.device) -> None:
        self._backend, self._device = backend, device
        self._under_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return zeros for now."""
        placed = self._backend.place(tensor, self._device, non_blocking=True)
        copy = torch.zeros_like(placed)
        self._under_way.append((copy, placed))
        return copy

    def sent(self) -> Callable[[], None]:
        """Return what fills the copies."""
        sent, self._under_way = self._under_way, []

        def arrive() -> None:
            for copy, placed in sent:
                copy.copy_(placed)

        return arrive
