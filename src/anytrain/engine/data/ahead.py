"""Read batches, and send them to the device, before they are asked for.

Where copies run beside the computing, two batches are on their way while a third one is worked
on. Elsewhere one batch is read ahead, so that the loop learns of the end before it is there.
"""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from anytrain.core.clock import Ledger
from anytrain.engine.data.workers import Waits
from anytrain.engine.tree import map_tensors
from anytrain.machine.backends.base import Backend, Lane

_NOTHING = object()


def place(batch: Any, send: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Any:
    """Return the batch with each tensor sent, and each other thing that can move moved."""

    def move(thing: Any) -> Any:
        if not isinstance(thing, UserDict):
            return thing.to(device)
        own = copy.copy(thing)  # a tokenizer's batch: its own `.to` would wait for every copy
        for key, value in thing.items():
            own[key] = place(value, send, device)
        return own

    return map_tensors(send, batch, movable=move)


class Placement:
    """Put batches where they are computed."""

    def __init__(self, backend: Backend, device: torch.device, non_blocking: bool = False) -> None:
        self.backend, self.device, self.non_blocking = backend, device, non_blocking
        self._lane: Lane | None = None

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device, once it is there."""
        put, device, non_blocking = self.backend.place, self.device, self.non_blocking
        return place(batch, lambda tensor: put(tensor, device, non_blocking), device)

    @property
    def lane(self) -> Lane | None:
        """The way that batches take beside the computing; None where there is none."""
        if self._lane is None:
            self._lane = self.backend.lane(self.device)
        return self._lane

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (self.backend, self.device, self.non_blocking)


class Coming(NamedTuple):
    """A batch that was read and not yet handed out."""

    batch: Any
    reached: Any
    """Where its stream stood after it; None where it cannot tell."""
    arrive: Callable[[], None] | None
    """Lets the device wait until it is there; None where it is yet to be placed."""


class Ahead:
    """A loader's batches in their order; INVARIANT: nothing is handed out that may not be read."""

    def __init__(
        self,
        batches: Iterator[Any],
        placement: Placement | None,
        reached: Callable[[], Any],
        ledger: Ledger,
        waits: Waits | None = None,
    ) -> None:
        self._batches, self._placement, self._reached = batches, placement, reached
        self._lane = None if placement is None else placement.lane
        self._depth = 1 if self._lane is None else 2
        self._coming: deque[Coming] = deque()
        self._is_read = False
        self._ledger, self._waits = ledger, waits
        self._waiting, self._sending = ledger.span("data"), ledger.span("transfer")
        self.reached: Any = None
        """Where the stream stood after the batch that was handed out last."""

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the batch that was handed out last."""
        return not self._coming

    def fill(self) -> None:
        """Read as far as a walk has read that stands between two batches."""
        while len(self._coming) < self._depth and not self._is_read:
            self._read()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.fill()
        if not self._coming:
            raise StopIteration
        batch, self.reached, arrive = self._coming.popleft()
        if arrive is None and self._placement is not None:
            with self._sending:
                batch = self._placement(batch)
        self._read()
        if arrive is not None:
            arrive()
        return batch

    def close(self) -> None:
        """Let go of what was not asked for; its memory is only free once the copies are done."""
        while self._coming:
            arrive = self._coming.popleft().arrive
            if arrive is not None:
                arrive()

    def _read(self) -> None:
        if self._is_read:
            return
        batch = self._wait()
        if batch is _NOTHING:
            self._is_read = True
            return
        reached, arrive = self._reached(), None
        if self._lane is not None and self._placement is not None:
            with self._sending:
                batch, arrive = self._send(batch, self._lane, self._placement.device)
        self._coming.append(Coming(batch, reached, arrive))

    def _send(self, batch: Any, lane: Lane, device: torch.device) -> tuple[Any, Callable[[], None]]:
        try:
            return place(batch, lane.send, device), lane.sent()
        except BaseException:
            lane.sent()()  # the part that was sent is dropped, but not before it has arrived
            raise

    def _wait(self) -> Any:
        """Return the next batch; what its reading cost goes to the ledger."""
        with self._waiting:
            batch = next(self._batches, _NOTHING)
        seconds, place = self._waiting.last, self._placement
        if place is not None and not place.backend.is_idle(place.device):
            self._ledger.hide("data")
            seconds = 0.0
        if self._waits is not None:
            self._waits.add(seconds)
        return batch
