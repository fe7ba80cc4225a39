"""Give memory back, and find the batch size that fits."""

from __future__ import annotations

import gc

from anytrain.compat.accelerate import refused
from anytrain.doors.accelerator import memory
from anytrain.doors.accelerator.memory import find_executable_batch_size, release_memory

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "should_reduce_batch_size",
]

__getattr__ = refused.module_getattr(__name__)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached device memory back; collect what nothing refers to first, if asked."""
    if garbage_collection:
        gc.collect()
    memory.backend().release()


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error says that memory is full."""
    return memory.is_out_of_memory(memory.backend(), exception)
