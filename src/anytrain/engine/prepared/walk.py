"""Where a loop stands, and what a walk over the data has besides its batches.

An order is drawn when an epoch begins. To take the epoch up in its middle, the same order is drawn
once more, from the generators as they were, and nobody else's numbers move.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from anytrain.core.clock import Ledger
from anytrain.core.notices import give_notice
from anytrain.engine import rng
from anytrain.engine.data.compiled_shapes import LoaderShapes
from anytrain.engine.data.prefetch import Placement, RecentBatches
from anytrain.engine.data.seeded import SeededBatchSampler
from anytrain.engine.data.trimming import PaddingTrim
from anytrain.engine.data.workers import AutoWorkers
from anytrain.machine.backends.base import Backend
from anytrain.machine.parallel.world import World


@dataclass(slots=True)
class Walk:
    """What the loader needs besides the batches: with whom, where to, and in which order."""

    cursor: Cursor
    world: World
    backend: Backend
    device: torch.device
    placement: Placement | None
    rng_types: tuple[str, ...] = ()
    generator: torch.Generator | None = None
    dispatching: bool = False
    split_batches: bool = False
    slice_fn: Callable[..., Any] | None = None
    seeded: SeededBatchSampler | None = None
    """What seeds the loading of each sample; None where nothing is drawn."""
    ledger: Ledger = field(default_factory=Ledger)
    stream: Any = None
    """A stream that can tell and take its place; None where there is none."""
    given: Any = None
    """The loader that the user prepared."""
    workers: AutoWorkers | None = None
    """Chooses how many processes load; None keeps to the loader's own number."""
    trim: PaddingTrim | None = None
    """Cuts padding off batches; None where they stay as they are."""
    kept: RecentBatches | None = None
    """The last batches on the host, where they cannot be loaded again."""
    shapes: LoaderShapes | None = None
    """Knows new shapes, where each is compiled; None where nothing compiles."""

    def stream_state(self) -> dict[str, Any] | None:
        """Return where the stream is, if it can tell."""
        return None if self.stream is None else copy.deepcopy(self.stream.state_dict())

    def tell_read_again(self, number: int, what: str) -> None:
        """Say that a stream which cannot take its place is read up to it."""
        give_notice(
            f"Reading {number} {what} again to get back to where the stream was. Give the "
            "dataset state_dict() and load_state_dict() to skip this (with num_workers=0).",
            stacklevel=2,
        )

    # -- what orders are drawn from -----------------------------------------------------------

    def share_generators(self) -> None:
        """Give all ranks the first one's generators, as far as they share any."""
        if self.rng_types:
            rng.share(self.rng_types, self.world, self.backend, self.device, self.generator)

    def generator_state(self) -> torch.Tensor | None:
        """Return the state of the generator that orders are drawn from, where it is no global."""
        return None if self.generator is None else self.generator.get_state()

    def generators(self) -> dict[str, Any]:
        """Return the states of all generators that an order may be drawn from."""
        return {**_process_generators(), "generator": self.generator_state()}

    def take_generator(self, state: torch.Tensor, sampler: Any) -> None:
        """Set the generator of its own that the sampler draws from, if it can have one."""
        if self.generator is None and hasattr(sampler, "generator"):
            self.generator = sampler.generator = torch.Generator()
        if self.generator is not None:
            self.generator.set_state(state)

    @contextmanager
    def drawing_again(
        self, at_start: dict[str, Any] | None, sampler: Callable[[], Any]
    ) -> Iterator[None]:
        """Let the block draw what was drawn when an epoch began, and nobody notice it after."""
        if at_start is None:
            yield
            return
        now, before = _process_generators(), self._take_order(at_start, sampler)
        yield
        _set_process_generators(now)
        if before is not None:
            sampler().generator = before

    def _take_order(
        self, at_start: dict[str, Any], sampler: Callable[[], Any]
    ) -> torch.Generator | None:
        """Set the generators as they were when the epoch's order was drawn.

        One process draws its order from torch's generator, several from one that they share. An
        epoch ends in the order it began with, so the other way is taken for its rest. Return the
        shared generator if it must be put back once the order is drawn.
        """
        _set_process_generators(at_start)
        if at_start["generator"] is None:
            if self.generator is None:
                return None
            sampler().generator = None
            return self.generator
        if self.generator is None:
            self.generator = sampler().generator = torch.Generator()
        self.generator.set_state(at_start["generator"])
        return None


def _process_generators() -> dict[str, Any]:
    """Return the process's own generators: samplers draw orders from any of them."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def _set_process_generators(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


class WalkedLoader(Protocol):
    """A loader as the cursor sees it."""

    end_of_dataloader: bool
    remainder: int

    @property
    def num_last(self) -> int:
        """How many rows of the last round count; 0 or less: all."""


class Boundary(Protocol):
    """What may end the run between two steps."""

    next_look: float
    """Until then, by perf_counter, a boundary may be passed over: nothing is due."""

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
        self.stops: Boundary | None = None
        self.end_step: Callable[[], None] | None = None
        """Ends the device's graph where a loop's step ends; None where the device has none."""
        self.left: tuple[int, list[Any] | None] | None = None
        """The number and the samples of the batch at which a walk was left early, by a break or an
        error; None while one goes on."""
        self._updates_before = 0
        self._open: list[weakref.ref[WalkedLoader]] = []

    def __getstate__(self) -> dict[str, Any]:
        # Which loaders are being walked is a fact of this process alone.
        return {**self.__dict__, "_open": [], "stops": None}

    def between(self, loader: WalkedLoader) -> None:
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
    def loader(self) -> WalkedLoader | None:
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

    def enter(self, loader: WalkedLoader) -> None:
        """Note that a loader is being walked."""
        if self.stops is not None:
            self.stops.arm()
        self.left = None
        if not self._open:
            self._updates_before = self.updates
        self._open.append(weakref.ref(loader))

    def leave(self, loader: WalkedLoader) -> None:
        """Note that a loader is done or was left early; one walk of it, if there are two."""
        for position in reversed(range(len(self._open))):
            if self._open[position]() is loader:
                del self._open[position]
                break
        self._open = [ref for ref in self._open if ref() is not None]

    @property
    def open_loaders(self) -> list[WalkedLoader]:
        """The loaders being walked, outermost first."""
        return [loader for ref in self._open if (loader := ref()) is not None]
