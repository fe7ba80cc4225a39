"""Read batches, and send them to the device, before they are asked for.

Where copies run beside the computing, two batches are on their way while a third one is worked
on. Elsewhere one batch is read ahead, so that the loop learns of the end before it is there.
"""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from anytrain.core.clock import Ledger
from anytrain.engine.data.trimming import MASK, Columns, PaddingTrim
from anytrain.engine.tree import leaves, map_tensors
from anytrain.machine.backends.base import Backend, Lane

_NOTHING = object()
_KEPT_BYTES = 2**27
_LEAST_BATCHES = 20
_MOST_KEPT = 1024  # a GPU's queue holds no more launches


class Placement:
    """Put batches where they are computed."""

    def __init__(self, backend: Backend, device: torch.device, non_blocking: bool = False) -> None:
        self.backend, self.device, self.non_blocking = backend, device, non_blocking
        self._lane: Lane | None = None

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device, once it is there."""
        put, device, non_blocking = self.backend.place, self.device, self.non_blocking
        if type(batch) in (dict, list, tuple):
            values = batch.values() if type(batch) is dict else batch
            if all(isinstance(each, torch.Tensor) and each.device == device for each in values):
                return type(batch)(batch)  # nearly every batch on a CPU: only its container is new
        return self.send(batch, lambda tensor: put(tensor, device, non_blocking))

    def send(self, batch: Any, send: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return the batch with each tensor sent, and each other thing that can move moved."""

        def move(thing: Any) -> Any:
            if not isinstance(thing, UserDict):
                return thing.to(self.device)
            own = copy.copy(thing)  # a tokenizer's batch: its own `.to` would wait for every copy
            for key, value in thing.items():
                own[key] = self.send(value, send)
            return own

        return map_tensors(send, batch, movable=move)

    @property
    def lane(self) -> Lane | None:
        """The way that batches take beside the computing; None where there is none."""
        if self._lane is None:
            self._lane = self.backend.lane(self.device)
        return self._lane

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (self.backend, self.device, self.non_blocking)


class ReadBatch(NamedTuple):
    """A batch that was read from the data."""

    epoch: int
    number: int
    """Its number in the epoch, from 0."""
    samples: list[Any] | None
    """Which samples of the data set its rows are; None where nobody knows."""
    on_host: Callable[[], Any]
    """Returns it as it was on the host, with what was drawn while loading it."""


class RecentBatches:
    """The last batches as they were on the host: what an error of the device is explained by.

    They are held and not copied, and together are bounded by the size of the first.
    """

    def __init__(self) -> None:
        self._batches: deque[ReadBatch] = deque(maxlen=0)
        self._epoch = self._num = 0

    def begin(self, epoch: int, first: int) -> None:
        """Count the batches that follow from this place; those of earlier epochs stay."""
        self._epoch, self._num = epoch, first
        while self._batches and self._batches[-1].epoch >= epoch:  # a walk that was left early
            self._batches.pop()

    def add(self, batch: Any) -> None:
        """Hold one more batch, and let go of the oldest."""
        if not self._batches.maxlen:
            sizes = [leaf.nbytes for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
            most = _KEPT_BYTES // max(sum(sizes), 1)
            self._batches = deque(maxlen=min(max(most, 2), _MOST_KEPT))
        self._batches.append(ReadBatch(self._epoch, self._num, None, lambda: batch))
        self._num += 1

    def __iter__(self) -> Iterator[ReadBatch]:
        return iter(list(self._batches))


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


class PrefetchedBatch(NamedTuple):
    """A batch that was read and not yet handed out."""

    batch: Any
    reached: Any
    """Where its stream stood after it; None where it cannot tell."""
    arrive: Callable[[], None] | None
    """Lets the device wait until it is there; None where it is yet to be placed."""
    columns: Columns | None = None
    """Those that hold more than padding, where others may be cut."""


class Prefetcher:
    """A loader's batches in their order; INVARIANT: nothing is handed out that may not be read."""

    def __init__(
        self,
        batches: Iterator[Any],
        placement: Placement | None,
        ledger: Ledger,
        reached: Callable[[], Any] | None = None,
        waits: Waits | None = None,
    ) -> None:
        self._batches, self._placement, self._reached = batches, placement, reached
        self._lane = None if placement is None else placement.lane
        self._depth = 1 if self._lane is None else 2
        self._coming: deque[PrefetchedBatch] = deque()
        self._is_read = False
        self._ledger, self._waits = ledger, waits
        self._waiting, self._sending = ledger.span("data"), ledger.span("transfer")
        self.runs_behind = placement is not None and placement.device.type != "cpu"
        """Whether the device works on a batch after the host has gone on."""
        self.explain: Callable[[Exception, Iterator[Any]], Exception] | None = None
        """Returns the error that says what was being loaded when one was raised."""
        self.kept: RecentBatches | None = None
        """Holds the last batches; None where nobody needs them."""
        self.trim: PaddingTrim | None = None
        """Cuts padding off batches; None where they stay as they are."""
        self.reached: Any = None
        """Where the stream stood after the batch that was handed out last."""
        self.is_last = False
        """Whether nothing follows the batch that was handed out last."""

    def fill(self) -> None:
        """Read as many batches ahead as there are while a loop works on one."""
        while len(self._coming) < self._depth and not self._is_read:
            self._read()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        coming = self._coming
        if len(coming) < self._depth:
            self.fill()
        if not coming:
            raise StopIteration
        batch, self.reached, arrive, columns = coming.popleft()
        if arrive is None and self._placement is not None:
            if self.runs_behind:
                with self._sending:
                    batch = self._placement(batch)
            else:  # it is where it is computed
                batch = self._placement(batch)
        if not self._is_read:
            self._read()
        if arrive is not None:
            arrive()
        if columns is not None and self.trim is not None:
            batch = self.trim(batch, columns)
        self.is_last = not coming
        return batch

    def close(self) -> None:
        """Let go of what was not asked for; its memory is only free once the copies are done."""
        while self._coming:
            arrive = self._coming.popleft().arrive
            if arrive is not None:
                with suppress(
                    RuntimeError
                ):  # a lost device; the error it was lost by is on its way
                    arrive()
        send_home = getattr(self._batches, "_shutdown_workers", None)
        if send_home is not None and not self._batches._persistent_workers:  # type: ignore[attr-defined]  # torch's iterator
            # Left to the garbage collector, which may take their queues first, it takes 10 s.
            send_home()

    def _read(self) -> None:
        """Read one more batch and send it off; what waiting for it cost goes to the ledger."""
        began = perf_counter()
        try:
            batch = next(self._batches, _NOTHING)
        except Exception as error:
            told = error if self.explain is None else self.explain(error, self._batches)
            if told is error:
                raise
            raise told from error
        # Taken off the entry that runs, by hand: this comes at every batch.
        waiting, running = self._waiting, self._ledger.running
        waiting.uses += 1
        waiting.last = 0.0 if running.is_whole else perf_counter() - began
        waiting.seconds += waiting.last
        running.seconds -= waiting.last
        if self.runs_behind:
            self._hide()
        if self._waits is not None:
            self._waits.add(self._waiting.last)
        if batch is _NOTHING:
            self._is_read = True
            return
        if self.kept is not None:
            self.kept.add(batch)
        reached = None if self._reached is None else self._reached()
        columns = (
            self.trim.measure(batch)
            if self.trim is not None and isinstance(batch, Mapping) and MASK in batch
            else None
        )
        arrive = None
        if self._lane is not None:
            with self._sending:
                batch, arrive = self._sent(batch, self._lane)
        self._coming.append(PrefetchedBatch(batch, reached, arrive, columns))

    def _hide(self) -> None:
        """Tell a wait that held the device up from one that it was too busy to notice."""
        place = self._placement
        if place is not None and not place.backend.is_idle(place.device):
            self._ledger.hide("data")

    def _sent(self, batch: Any, lane: Lane) -> tuple[Any, Callable[[], None]]:
        assert self._placement is not None
        try:
            return self._placement.send(batch, lane.send), lane.sent()
        except BaseException:
            lane.sent()()  # the part that was sent is dropped, but not before it has arrived
            raise
