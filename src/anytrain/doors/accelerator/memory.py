"""Give memory back, and find the batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

from anytrain.core import environment
from anytrain.core.errors import BadType, NothingFits
from anytrain.engine.assemble import current
from anytrain.machine.backends import probe
from anytrain.machine.backends.base import Backend

# In lower case. At the second, of cuDNN, HF tries a smaller batch as well.
_FULL = ("out of memory", "cudnn_status_not_supported")


def release_memory(*objects: Any) -> list[None]:
    """Drop the objects and give cached device memory back; assign the result to their names.

    >>> a, b = [0] * 3, [1] * 3
    >>> a, b = release_memory(a, b)
    >>> a is None and b is None
    True
    """
    num_objects = len(objects)
    del objects
    _release(backend())
    return [None] * num_objects


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function of a batch size: on out-of-memory it is called again with less.

    The size is a tenth less each time, or set by `reduce_batch_size_fn`. Memory is freed before
    each try, and the size that worked is where the next call starts.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    found: Callable[..., Any] = function
    learnt = starting_batch_size

    @functools.wraps(found)
    def with_batch_size(*args: Any, **kwargs: Any) -> Any:
        nonlocal learnt
        _check_call(found, args)
        device = backend()
        while True:
            if learnt < 1:
                raise NothingFits(
                    "No executable batch size found, reached zero.",
                    why="even a batch of one sample runs out of memory, or none was asked for.",
                    fix="use a smaller model or shorter samples, gradient checkpointing, or bf16.",
                )
            _release(device)
            try:
                return found(learnt, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 -- re-raised unless it is out of memory
                if not is_out_of_memory(device, error):
                    raise
            less = reduce_batch_size_fn
            learnt = int(learnt * 0.9) if less is None else less()

    return with_batch_size


def is_out_of_memory(backend: Backend, error: BaseException) -> bool:
    """Ask the backend; a user's own words count too, as the peers' wrappers raise plain errors."""
    return backend.is_out_of_memory(error) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _FULL)
    )


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) < len(args) + 1:
        shown = ", ".join(f"{name}={value}" for name, value in zip(parameters[1:], args[1:]))  # noqa: B905 -- the lengths differ, that is the mistake
        raise BadType(
            f"Batch size was passed into `{function.__name__}` as the first argument when called.",
            why="find_executable_batch_size passes it by itself.",
            fix=f"remove this as the decorator already does so: `{function.__name__}({shown})`.",
        )


def backend() -> Backend:
    """Return the current run's backend; before any run, the one that it would take."""
    found = current.get()
    return probe.choose(environment.read().wishes.device) if found is None else found.backend


def _release(backend: Backend) -> None:
    gc.collect()
    backend.release()
