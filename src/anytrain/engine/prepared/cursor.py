"""Where a loop stands: which loaders are open, and whether this batch ends an update."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Walked(Protocol):
    """A loader as the cursor sees it."""

    end_of_dataloader: bool
    remainder: int

    @property
    def num_last(self) -> int:
        """How many rows of the last round count; 0 or less: all."""


class Stops(Protocol):
    """What may end the run between two steps."""

    def arm(self) -> None:
        """Begin to listen for a wish to stop."""

    def boundary(self) -> None:
        """Leave here, if this is where every rank stops."""

    def disarm(self) -> None:
        """Listen no more."""


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How many batches make one update, and what happens around its end."""

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


class Cursor:
    """One session's place in its loop.

    `sync` is read by the optimizer, the scheduler and the model: a batch that does not end an
    update leaves parameters, schedule and gradients alone.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self.accumulation = accumulation
        self.sync = True
        self.micro = 0
        self.updates = 0
        self.stops: Stops | None = None
        self.end_step: Callable[[], None] | None = None
        """Ends the device's graph where a loop's step ends; None where the device has none."""
        self.left: tuple[int, list[Any] | None] | None = None
        """The number and the samples of the batch at which a walk was left early, by a break or an
        error; None while one goes on."""
        self._updates_before = 0
        self._open: list[weakref.ref[Walked]] = []

    def __getstate__(self) -> dict[str, Any]:
        # Which loaders are being walked is a fact of this process alone.
        return {**self.__dict__, "_open": [], "stops": None}

    def between(self, loader: Walked) -> None:
        """The loop asks for its next batch: after an update of its own the run may end here.

        An evaluation makes no updates: ending inside it would lose the rest of it. A run that
        never makes one (its optimizer was not prepared) may end after any batch.
        """
        moved = self.updates != self._updates_before or self.updates == 0
        outermost = bool(self._open) and self._open[0]() is loader
        if self.stops is not None and self.sync and moved and outermost:
            self._updates_before = self.updates
            self.stops.boundary()

    def next_micro(self) -> bool:
        """Count one more batch; return whether it ends an update."""
        if self.accumulation.sync_with_dataloader and self.at_end:
            self.micro = 0
            self.sync = True
        else:
            self.micro += 1
            self.sync = self.micro % self.accumulation.num_steps == 0
        return self.sync

    @property
    def loader(self) -> Walked | None:
        """The innermost loader being walked."""
        while self._open:
            loader = self._open[-1]()
            if loader is not None:
                return loader
            self._open.pop()
        return None

    @property
    def at_end(self) -> bool:
        """Whether the innermost loader is at its last batch."""
        loader = self.loader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """How many samples of the last round are no repeats; -1 where nobody knows."""
        loader = self.loader
        return -1 if loader is None else loader.remainder

    @property
    def num_last(self) -> int:
        """How many rows of the last round count, whatever was made of them; 0 or less: all."""
        loader = self.loader
        return loader.num_last if loader is not None else -1

    def enter(self, loader: Walked) -> None:
        """Note that a loader is being walked."""
        if self.stops is not None:
            self.stops.arm()
        self.left = None
        self._open.append(weakref.ref(loader))

    def leave(self, loader: Walked) -> None:
        """Note that a loader is done or was left early; one walk of it, if there are two."""
        for position in reversed(range(len(self._open))):
            if self._open[position]() is loader:
                del self._open[position]
                break
        self._open = [ref for ref in self._open if ref() is not None]

    @property
    def open_loaders(self) -> list[Walked]:
        """The loaders being walked, outermost first."""
        return [loader for ref in self._open if (loader := ref()) is not None]
