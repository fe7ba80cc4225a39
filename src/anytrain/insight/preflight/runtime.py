"""What torch's own module of a device says to a script that asks, where the device is claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

_COUNTS = """memory_allocated max_memory_allocated memory_reserved max_memory_reserved
driver_allocated_memory current_allocated_memory"""
_ON_A_MAC = ("is_available", "is_built", "is_macos_or_newer", "is_macos13_or_newer")
_DONE = """synchronize empty_cache set_device ipc_collect manual_seed manual_seed_all
reset_peak_memory_stats reset_max_memory_allocated"""


@contextmanager
def answering(device: torch.device, num_devices: int, memory_bytes: int | None) -> Iterator[None]:
    """Let torch's modules say in the block that the device is there and idle."""
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
    """Return what torch's own module of the device says to a script that asks."""
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
        """Whether everything is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is being recorded."""
        return False

    def elapsed_time(self, *args: Any) -> float:
        """Return no time at all."""
        return 0.0

    def record(self, *args: Any) -> None:
        """Do nothing."""

    synchronize = wait = wait_event = wait_stream = record

    def record_event(self, *args: Any) -> Idle:
        """Return an event that has happened."""
        return Idle()
