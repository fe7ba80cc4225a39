"""What a walk over the data has besides its batches, and how an epoch is taken up again.

An order is drawn when an epoch begins. To take the epoch up in its middle, the same order is drawn
once more, from the generators as they were, and nobody else's numbers move.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from anytrain.core.clock import Ledger
from anytrain.core.notices import give_notice
from anytrain.engine import rng
from anytrain.engine.data.compiled_shapes import LoaderShapes
from anytrain.engine.data.prefetch import Kept, Placement
from anytrain.engine.data.seeded import Tickets
from anytrain.engine.data.workers import AutoWorkers
from anytrain.engine.prepared.cursor import Cursor
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
    tickets: Tickets | None = None
    """What seeds the loading of each sample; None where nothing is drawn."""
    ledger: Ledger = field(default_factory=Ledger)
    stream: Any = None
    """A stream that can tell and take its place; None where there is none."""
    given: Any = None
    """The loader that the user prepared."""
    workers: AutoWorkers | None = None
    """Chooses how many processes load; None keeps to the loader's own number."""
    kept: Kept | None = None
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
