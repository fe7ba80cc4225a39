"""Loading workers: how many a loop needs, and how they outlive a signal meant for it.

A Ctrl-C in a terminal, and a scheduler's SIGTERM, reach the workers too. Were they to die at once,
the step that should still be finished and saved would fail for want of a batch.
"""

from __future__ import annotations

import math
import pickle
import signal
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler

PATIENCE_S = 60
_LEAST_BATCHES = 20
_LEAST_SHARE = 0.05  # of the time between two batches
_LEAST_WAIT_S = 0.001  # a batch that comes from a worker costs about a third of this
_LEAST_SAVED_S = 1.0  # in an epoch; starting workers costs about a tenth of it
_MOST_WORKERS = 8
_MOST_BYTES = 256 << 20


class PatientWorker:
    """A worker's first call: leave Ctrl-C to the main process, and SIGTERM for a while."""

    def __init__(self, first: Callable[[int], None] | None) -> None:
        self.first = first

    def __call__(self, worker: int) -> None:
        """Set the worker up, then do what the user wanted done first."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _leave_later)
        if self.first is not None:
            self.first(worker)


class Waits:
    """How long an epoch's batches were waited for, as far as that held the device up."""

    def __init__(self) -> None:
        self.total = 0.0
        self._periods: list[float] = []
        self._last: float | None = None

    def add(self, seconds: float) -> None:
        """Count one more batch that was waited for so long."""
        now = perf_counter()
        if self._last is not None:
            self._periods.append(now - self._last)
        self._last = now
        self.total += seconds

    def begin(self) -> None:
        """Count a new epoch."""
        self.__init__()  # type: ignore[misc]  # all that it holds is of one epoch

    @property
    def period(self) -> float | None:
        """The usual time from batch to batch; None where an epoch is too short to tell."""
        return median(self._periods) if len(self._periods) >= _LEAST_BATCHES else None

    @property
    def mean(self) -> float:
        """The mean wait for a batch."""
        return self.total / max(len(self._periods), 1)


def wanted(waits: Waits, num_cores: int) -> tuple[int, str] | None:
    """Return how many workers the waits ask for, and why; None where none would do better.

    >>> wanted(Waits(), num_cores=8) is None
    True
    """
    period, most = waits.period, min(num_cores - 1, _MOST_WORKERS)
    if period is None or num_cores <= 2 or waits.total < _LEAST_SAVED_S:
        return None
    share = waits.mean / period
    if share < _LEAST_SHARE or waits.mean < _LEAST_WAIT_S:
        return None
    # As many as load a batch in the time of a step, and one more for what carrying it costs.
    number = math.ceil(waits.mean / max(period - waits.mean, period / 100)) + 1
    told = f"{waits.mean * 1000:.1f} ms of {period * 1000:.1f} ms a batch were spent loading it"
    return min(number, most), told


def obstacle(dataset: Any, collate: Any, sampler: Any) -> str | None:
    """Return what keeps workers from loading these samples just as this process would."""
    if not sys.platform.startswith("linux"):
        return "workers that begin as a copy of this process are safe on Linux alone"
    if isinstance(dataset, IterableDataset):
        return "a stream is read in one process"
    while getattr(sampler, "batch_sampler", None) is not None:
        sampler = sampler.batch_sampler
    inner = getattr(sampler, "sampler", None) or sampler
    if not _draws_at_once(inner):  # it may draw as it goes, from generators that the model uses
        return f"the order comes from a {type(inner).__name__}"
    try:
        _Probe(_Counted(), protocol=pickle.HIGHEST_PROTOCOL).dump((dataset, collate))
    except Exception as error:  # noqa: BLE001  # a dataset may raise anything when it is asked for its state
        return f"it cannot be sent to another process ({error})"
    return None


def _draws_at_once(sampler: Any) -> bool:
    """Whether the sampler draws a whole epoch's order when it begins, or from a generator alone."""
    known = isinstance(sampler, RandomSampler | SequentialSampler)
    kind = type(sampler).__module__.split(".")[0]
    return (known and kind in ("torch", "anytrain")) or (
        kind == "anytrain" and isinstance(sampler, Sampler)
    )


class _Counted:
    """A file that keeps nothing, and ends after so many bytes."""

    def __init__(self) -> None:
        self._written = 0

    def write(self, data: Any) -> int:
        """Count the bytes."""
        self._written += len(data)
        if self._written > _MOST_BYTES:
            raise ValueError(f"it holds more than {_MOST_BYTES >> 20} MiB of objects")
        return len(data)


class _Probe(pickle.Pickler):
    """Finds out whether a thing could be sent; its arrays are not looked into."""

    def reducer_override(self, thing: Any) -> Any:
        """Leave arrays out, and refuse those that a worker could not read."""
        if isinstance(thing, torch.Tensor):
            if thing.device.type != "cpu":
                raise ValueError(f"a tensor of it is on {thing.device}")
            return int, ()
        if isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
            return int, ()
        return NotImplemented


def _leave_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(PATIENCE_S)
