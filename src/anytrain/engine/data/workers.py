"""Loading workers: how many a loop needs, and how they outlive a signal meant for it.

A Ctrl-C in a terminal, and a scheduler's SIGTERM, reach the workers too. Were they to die at once,
the step that should still be finished and saved would fail for want of a batch.

A worker begins as a copy of this process: it shares its open files and connections, and learns
nothing of what changes here later. Data sets and collators that hold nothing of that kind are
known by name, or say `loads_alike = True` in their own class; no others are taken for such.
"""

from __future__ import annotations

import atexit
import math
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

from torch._C import _remove_worker_pids, _set_worker_pids
from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from anytrain.engine.data.collate import collate as stacked
from anytrain.engine.data.columns import DropColumns
from anytrain.engine.data.packing import Packed
from anytrain.engine.data.padding import ToBuckets, WithoutFullMask
from anytrain.engine.data.prefetch import Waits
from anytrain.engine.data.seeded import SeededCollate, SeededDataset

PATIENCE_S = 60
_LEAST_SHARE = 0.05  # of the time between two batches
_LEAST_WAIT_S = 0.001  # a batch that comes from a worker costs about a third of this
_LEAST_SAVED_S = 1.0  # in an epoch; starting workers costs about a tenth of it
_NO_GAIN = 0.98  # of the time that a batch took before: a smaller gain may be chance
_MOST_WORKERS = 8
_at_work: weakref.WeakSet[Any] = weakref.WeakSet()
"""Iterators that have workers."""


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


def sent_home(batches: Iterator[Any]) -> Iterator[Any]:
    """Return a loader's iterator, whose workers are sent home when this process ends.

    A script may end with an epoch half read. Python then tells the workers to end by SIGTERM, which
    patient ones answer a minute later.
    """
    if hasattr(batches, "_shutdown_workers"):
        _at_work.add(batches)
    return batches


@atexit.register  # after multiprocessing's own, so it comes before that
def _send_home() -> None:
    for batches in list(_at_work):
        batches._shutdown_workers()


class MindedWorkers(_MultiProcessingDataLoaderIter):
    """A loader's iterator that tells of a dead worker where a batch is waited for.

    torch tells by a signal, wherever the main thread is: in the middle of a step, or of a save.
    """

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Iterator[Any]:
        """Return the loader's iterator, one that tells so where torch's own has workers."""
        batches = iter(loader)
        if type(batches) is _MultiProcessingDataLoaderIter:
            batches.__class__ = cls  # it may be one that outlives its epoch
            batches._mind(False)  # type: ignore[attr-defined]  # the class has just changed
        return batches

    def _get_data(self) -> Any:
        self._mind(True)
        try:
            for worker, is_expected in zip(self._workers, self._workers_status, strict=True):
                if is_expected and not worker.is_alive():
                    raise RuntimeError(f"DataLoader worker (pid {worker.pid}) ended by itself")
            return super()._get_data()  # type: ignore[no-untyped-call]
        finally:
            self._mind(False)

    def _mind(self, minded: bool) -> None:
        """Let torch's handler of the signal look at these workers, or pass them over."""
        if minded:
            _set_worker_pids(id(self), tuple(each.pid or 0 for each in self._workers))
        else:
            _remove_worker_pids(id(self))
        self._worker_pids_set = minded


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


def obstacle(loader: DataLoader[Any], batch_sampler: Any) -> str | None:
    """Return what keeps workers from loading just what this process would."""
    if not sys.platform.startswith("linux"):
        return "workers that begin as a copy of this process are safe on Linux alone"
    unknown = next((part for part in _chain(batch_sampler) if not _is_known(part)), None)
    if unknown is not None:  # it may draw as it goes, from the generators that the model uses
        return f"the order comes from a {type(unknown).__name__}"
    name = unlike(loader)
    if name is not None:
        return f"{name} may load something else in another process"
    return None


def _chain(sampler: Any) -> Iterator[Any]:
    """Yield a batch sampler and what it takes its batches or samples from."""
    while sampler is not None:
        yield sampler
        below = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if below is None else below


def _is_known(sampler: Any) -> bool:
    """Whether it draws an epoch's order when that begins, or from a generator of its own."""
    return type(sampler).__module__.split(".")[0] in ("torch", "anytrain")


class AutoWorkers:
    """How many workers load an epoch: chosen from how the epoch before was waited for.

    INVARIANT: who loads a sample changes neither it nor the order. So workers are only taken for
    data that is known to load alike everywhere, and sent home once it is changed. A choice that
    fails, or that does not pay, is taken back.
    """

    def __init__(self, num_cores: int, tell: Callable[[str, str], None]) -> None:
        self.waits = Waits()
        self.number = 0
        self._num_cores, self._tell = num_cores, tell
        self._before: float | None = None
        self._is_settled = False

    def choose(self, loader: DataLoader[Any], batch_sampler: Any) -> int:
        """Return the number of workers for the epoch that begins."""
        if not self._is_settled and self.number:
            self._judge(self.waits.period)
        elif not self._is_settled:
            self._consider(loader, batch_sampler)
        self.waits.begin()
        return self.number

    def give_up(self, because: str) -> None:
        """Load in this process from now on."""
        self.number, self._is_settled = 0, True
        self._tell("0", because)

    def _consider(self, loader: DataLoader[Any], batch_sampler: Any) -> None:
        found = wanted(self.waits, self._num_cores)
        if found is None:
            return
        number, because = found
        reason = obstacle(loader, batch_sampler)
        if reason is not None:
            self.give_up(f"{because}, but {reason}")
            return
        self.number, self._before = number, self.waits.period
        self._tell(str(number), because)

    def _judge(self, period: float | None) -> None:
        if period is None or self._before is None:
            return
        was, now = f"{self._before * 1000:.1f} ms", f"{period * 1000:.1f} ms"
        if period > _NO_GAIN * self._before:
            self.give_up(f"a batch took {now} with {self.number} workers, and {was} without")
        self._is_settled = True


def with_workers(loader: DataLoader[Any], number: int) -> dict[str, Any]:
    """Return the options that let workers load a loader's batches.

    They begin as copies of this process: nothing is imported again, so a script needs no guard.
    """
    return {
        "num_workers": number,
        "worker_init_fn": PatientWorker(loader.worker_init_fn),
        "multiprocessing_context": "fork",
        "timeout": PATIENCE_S,  # one that hangs must not hang the run
    }


def _leave_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(PATIENCE_S)


_HOLDS: dict[type, str] = {
    Subset: "dataset",
    SeededDataset: "dataset",
    **dict.fromkeys((SeededCollate, DropColumns, ToBuckets, Packed, WithoutFullMask), "collate"),
}
"""What only passes on what something else loads, and the name it has that under."""
_ARROW, _COLLATORS = "datasets.arrow_dataset", "transformers.data.data_collator"
_ARROW_FORMATS = (None, "numpy", "torch")  # any other may be a function of the user's
_NOTHING = object()


def unlike(loader: DataLoader[Any]) -> str | None:
    """Return the name of what may load something else in another process; None where nothing."""
    for part in _parts(loader):
        if not _loads_alike(part):
            return str(getattr(part, "__qualname__", type(part).__qualname__))
    return None


class Changes:
    """Notices that something which loads was changed since its copies were made."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._before = [(part, dict(_attributes(part))) for part in _parts(loader)]

    def changed(self) -> str | None:
        """Return the name of what was given another attribute; None where nothing was."""
        for part, before in self._before:
            now = _attributes(part)
            same = all(now.get(name, _NOTHING) is value for name, value in before.items())
            if not same or len(now) != len(before):
                return type(part).__qualname__
        return None


def _attributes(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(part, "__dict__", {})
    return found


def _parts(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield everything that takes part in making a batch."""
    yield from _with_held(loader.dataset)
    yield from _with_held(loader.collate_fn)


def _with_held(part: Any) -> Iterator[Any]:
    yield part
    if type(part) is ConcatDataset:
        for each in part.datasets:
            yield from _with_held(each)
    elif type(part) in _HOLDS:
        yield from _with_held(getattr(part, _HOLDS[type(part)]))


def _loads_alike(part: Any) -> bool:
    kind = type(part)
    if kind in _HOLDS or kind is ConcatDataset or part is default_collate or part is stacked:
        return True
    if kind.__module__ == _ARROW:  # its rows are mapped into memory, and never change
        return part.format["type"] in _ARROW_FORMATS
    # A subclass may do anything: what its parent says of itself is not said of it.
    return vars(kind).get("loads_alike") is True or _is_transformers(part)


def _is_transformers(collate: Any) -> bool:
    """Whether it is a collator of that library, which holds nothing from elsewhere."""
    if getattr(collate, "__module__", None) != _COLLATORS:
        return False
    if isinstance(collate, FunctionType):
        return True
    homes = (getattr(value, "__module__", None) for value in _attributes(collate).values())
    return all(home is None or home.split(".")[0] == "transformers" for home in homes)
