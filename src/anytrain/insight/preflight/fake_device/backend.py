"""The backend of a fake device, and the patched `torch.cuda` or `torch.mps` that a script asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

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
_COUNTS = """memory_allocated max_memory_allocated memory_reserved max_memory_reserved
driver_allocated_memory current_allocated_memory"""
_ON_A_MAC = ("is_available", "is_built", "is_macos_or_newer", "is_macos13_or_newer")
_DONE = """synchronize empty_cache set_device ipc_collect manual_seed manual_seed_all
reset_peak_memory_stats reset_max_memory_allocated"""


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
class FakeBackend(Fake):
    """The backend that sessions choose while a run is traced."""

    kind: str = "cuda"
    placing: Callable[[], None] = field(default=lambda: None)
    """Called before each batch is sent."""

    @property
    def name(self) -> str:  # type: ignore[override]  # Fake has one name
        return self.kind

    def device(self, local_rank: int) -> torch.device:
        return device_of(self.kind)

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        """Return the tensor on the claimed device, in a dtype that it has."""
        self.placing()
        narrower = _NARROWER.get(tensor.dtype) if self.kind == "mps" else None
        return tensor.to(device, narrower or tensor.dtype)

    def lane(self, device: torch.device) -> None:  # type: ignore[override]  # Fake has a slow one
        """Return None: nothing is copied."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        return None

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        """Do nothing."""


def fake_backend(target: Target, placing: Callable[[], None]) -> Any:
    """Return the backend for a target."""
    return FakeBackend(
        None, facts_of(target), target.num_devices, None, kind=target.kind, placing=placing
    )


# -- torch's module of the device -----------------------------------------------------------------


@contextmanager
def patched_device_module(
    device: torch.device, num_devices: int, memory_bytes: int | None
) -> Iterator[None]:
    """Patch torch's module of the device in the block: it is there, and idle."""
    if device.type == "cpu":
        yield
        return
    module, common = getattr(torch, device.type, None), getattr(torch, "accelerator", None)
    said = _answers_of(device, num_devices, memory_bytes)
    changes = [(h, n, _saying(answer)) for h in (module, common) for n, answer in said.items()]
    changes += [(holder, name, Idle) for holder in (torch, module) for name in ("Event", "Stream")]
    if device.type == "mps":
        changes += [(torch.backends.mps, n, _saying(True)) for n in _ON_A_MAC]
    with ExitStack() as stack:
        for holder, name, own in changes:
            if hasattr(holder, name):
                stack.enter_context(mock.patch.object(holder, name, own))
        yield


def _answers_of(device: torch.device, num_devices: int, memory_bytes: int | None) -> dict[str, Any]:
    """Return what the functions of torch's module of the device return, by name."""
    facts = SimpleNamespace(
        name=f"a claimed {device.type} device",
        total_memory=memory_bytes or 0,
        major=9,
        minor=0,
        multi_processor_count=1,
    )
    return {
        "is_available": True,
        "device_count": num_devices,
        "current_device": 0,
        "current_device_index": 0,
        "current_accelerator": device,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "get_device_name": facts.name,
        "get_device_capability": (9, 0),
        "get_device_properties": facts,
        "mem_get_info": (facts.total_memory, facts.total_memory),
        "recommended_max_memory": facts.total_memory,
        "stream": Idle(),
        "current_stream": Idle(),
        **dict.fromkeys(_COUNTS.split(), 0),
        **dict.fromkeys(_DONE.split(), None),
    }


def _saying(answer: Any) -> Callable[..., Any]:
    """Return a function of its own for each name: torch's compiler keeps a table of them."""
    return lambda *args, **kwargs: answer


class Idle:
    """A stream, or an event on one, of a device on which everything is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, *args: Any) -> float:
        """Return no time at all."""
        return 0.0

    def record(self, *args: Any) -> None:
        """Do nothing."""

    synchronize = wait = wait_event = wait_stream = record

    def record_event(self, *args: Any) -> Idle:
        return Idle()
