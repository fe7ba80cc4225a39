"""The backend of a claimed device: the same rooms run, on what is not here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from anytrain.core.facts import Capabilities
from anytrain.insight.preflight.targets import Target
from anytrain.machine.backends.fake import Fake

_DTYPES = {
    "cuda": ("float32", "bfloat16", "float16", "float64"),
    "mps": ("float32", "bfloat16", "float16"),
    "tpu": ("float32", "bfloat16", "float16", "float64"),
    "xla": ("float32", "bfloat16", "float16", "float64"),
    "cpu": ("float32", "bfloat16", "float64"),
}
_TRANSPORTS = {"cuda": "nccl", "mps": None, "tpu": "tpu_dist", "xla": "xla", "cpu": "gloo"}
_TYPES = {"tpu": "xla"}
_NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def device_of(kind: str) -> torch.device:
    """Return the device that stands for a kind; torch knows no TPU by name, so xla is one."""
    return torch.device("cpu") if kind == "cpu" else torch.device(_TYPES.get(kind, kind), 0)


def facts_of(target: Target) -> Capabilities:
    """Return what a device of this kind can do."""
    kind = target.kind
    return Capabilities(
        backend=kind,
        device=str(device_of(kind)),
        name=f"{target.name}, claimed",
        dtypes=_DTYPES[kind],
        memory_bytes=target.memory_bytes,
        process_group=_TRANSPORTS[kind],
        scales_gradients=kind in ("cuda", "mps"),
        # torch's fused AdamW on mps runs, and ignores the flag that tells it to skip a step.
        fuses_optimizer=kind == "cuda",
        traces=kind in ("tpu", "xla"),
    )


@dataclass(frozen=True)
class StandIn(Fake):
    """A backend whose device is claimed."""

    kind: str = "cuda"
    placing: Callable[[], None] = field(default=lambda: None)
    """Told of each batch before it is sent."""

    @property
    def name(self) -> str:  # type: ignore[override]  # Fake has one name
        """The word users say."""
        return self.kind

    def device(self, local_rank: int) -> torch.device:
        """Return the claimed device."""
        return device_of(self.kind)

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        """Return the tensor on the claimed device, in a dtype that it has."""
        self.placing()
        narrower = _NARROWER.get(tensor.dtype) if self.kind == "mps" else None
        return tensor.to(device, narrower or tensor.dtype)

    def lane(self, device: torch.device) -> None:  # type: ignore[override]  # Fake has a slow one
        """Return None: nothing is copied."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """Return None: nothing is drawn there."""
        return None

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        """Do nothing."""


def stand_in(target: Target, placing: Callable[[], None]) -> Any:
    """Return the backend for a target."""
    return StandIn(
        None, facts_of(target), target.num_devices, None, kind=target.kind, placing=placing
    )
