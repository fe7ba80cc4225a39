"""Give memory back, and find the batch size that fits."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

from anytrain.doors.accelerator import memory
from anytrain.doors.accelerator.memory import release_memory

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "should_reduce_batch_size",
]

_LESS = 0.9  # what HF multiplies a batch size by; anytrain's own function halves it


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached device memory back; collect what nothing refers to first, if asked."""
    if garbage_collection:
        gc.collect()
    memory.backend().release()


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error says that memory is full."""
    return memory.is_out_of_memory(memory.backend(), exception)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function of a batch size: on out-of-memory it is called with a tenth less."""
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    def less() -> int:
        nonlocal size
        size = int(size * _LESS)
        return size

    return memory.find_executable_batch_size(
        function, starting_batch_size, reduce_batch_size_fn or less
    )
