"""Parts of a recorded step in fewer launches than torch needs.

They compute what torch computes, in another order of additions, so results agree to rounding. In
deterministic mode they are left out, and a recorded step is the eager one to the bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from anytrain.fast.kernels.step import Kernels
from anytrain.fast.shortcuts import adam
from anytrain.fast.shortcuts.adam import FusedAdam
from anytrain.fast.shortcuts.bf16_weights import RoundedWeights
from anytrain.fast.shortcuts.layers import Sightings
from anytrain.fast.shortcuts.norms import norm_kinds


class NoShortcut(Exception):
    """A gradient is not where the kernels can read it."""


class Shortcuts:
    """Weights rounded once a step, and one pass over gradients to measure and one to update."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        max_norm: float,
        *,
        rounds: bool,
        device: torch.device,
    ) -> None:
        self._model, self._optimizer, self._max_norm = model, optimizer, max_norm
        self._sightings = Sightings(model) if rounds else None
        self._kernels = Kernels(device, norm_kinds(model) if rounds else ())
        self._copies: RoundedWeights | None = None
        self._halves: RoundedWeights | None = None
        """The copies that the recording at hand works with."""
        self._puts_off = rounds
        """Whether sums and copies are computed when they are read (see `later`), and layers that
        read the same are one."""
        self._adam: FusedAdam | None = None
        self._made: list[tuple[FusedAdam | None, RoundedWeights | None]] = []
        """What recordings read from as long as they are there."""

    @property
    def is_done(self) -> bool:
        """Whether it is known if the kernels are there."""
        return self._kernels.is_done()

    @property
    def are_there(self) -> bool:
        """Whether the kernels could be compiled."""
        return self._kernels.are_there()

    @property
    def problem(self) -> str:
        """Why the kernels are not there, in one line."""
        told = (self._kernels.problem or "").strip()
        return told.splitlines()[0] if told else "they could not be compiled"

    def prepare(self, *, is_whole: bool) -> None:
        """Make the tables of one recording; `is_whole` says if one micro-batch is the step.

        Of several micro-batches gradients are added up, which bfloat16 is too coarse for.
        """
        own = self._optimizer
        self._adam = None if own is None else FusedAdam(self._kernels, own)
        self._halves = self._rounded() if is_whole else None
        self._made.append((self._adam, self._halves))

    def _rounded(self) -> RoundedWeights | None:
        if self._sightings is None:
            return None
        if self._copies is None or self._copies.is_stale():
            groups = self._sightings.groups(joined=self._puts_off)
            self._copies = (
                RoundedWeights(self._kernels, self._model, groups, puts_off=self._puts_off)
                if groups
                else None
            )
        else:
            self._copies.look_again()
        return self._copies

    def observed(self) -> AbstractContextManager[None]:
        """Return what a step runs in that runs op by op, to learn which layers go together."""
        return nullcontext() if self._sightings is None else self._sightings.watched()

    def forward(self) -> AbstractContextManager[None]:
        """Return what the forward and backward passes run in."""
        return nullcontext() if self._halves is None else self._halves.used()

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's gradient, wherever the backward pass has left it."""
        return parameter.grad if self._halves is None else self._halves.gradient(parameter)

    def measure(self) -> torch.Tensor:
        """Return the norm of the gradients."""
        assert self._adam is not None
        if not self._adam.knows_all() or (self._halves and not self._halves.knows(self._adam)):
            raise NoShortcut("a parameter has got its first gradient only now")
        found = []
        for parameter, _ in self._adam.parameters:
            gradient = self.gradient(parameter)
            if gradient is not None and not adam.can_read(gradient, parameter):
                gradient = gradient.contiguous()
                if not adam.can_read(gradient, parameter):
                    raise NoShortcut(f"a gradient of shape {tuple(gradient.shape)}")
            found.append(gradient)
        return self._adam.measure(found, self._max_norm)

    def update(self, skipped: torch.Tensor) -> None:
        """Update the weights, unless `skipped` is 1."""
        assert self._adam is not None
        self._adam.update(skipped)

    def settle(self) -> None:
        """Fill the tables in."""
        if self._adam is not None:
            self._adam.settle()

    def simplify(self) -> bool:
        """Put nothing off from here on, and join no layers; False where none of it was done."""
        could, self._puts_off, self._copies = self._puts_off, False, None
        return could

    def forget(self) -> None:
        """Let go of what recordings have read from: there are none any more."""
        self._made.clear()
        self._adam = self._halves = None
        if self._copies is not None and self._copies.is_stale():
            self._copies = None

    def clear(self) -> None:
        """Let go of the gradients."""
        if self._halves is not None:
            self._halves.clear()


class Shortening:
    """The shortcuts that a step's recordings take, until one fails; then they take none."""

    def __init__(self, shortcuts: Shortcuts | None, optimizers: tuple[Any, ...]) -> None:
        self.taken = shortcuts
        """None where torch does it all."""
        self._optimizers = optimizers
        self._because = ""
        """Why there are none any more."""

    def observed(self) -> AbstractContextManager[None]:
        """Return what a step runs in that runs op by op and is looked at."""
        return nullcontext() if self.taken is None else self.taken.observed()

    def is_ready(self) -> bool:
        """Whether a recording may begin: the first time on a machine kernels are compiled."""
        return self.taken is None or self.taken.is_done

    def prepare(self, *, is_whole: bool) -> None:
        """Make what must be there before a recording begins; see `Shortcuts.prepare`."""
        if self.taken is not None and not self.taken.are_there:
            self._because, self.taken = self.taken.problem, None
        if self.taken is not None:
            self.taken.prepare(is_whole=is_whole)

    def settle(self) -> None:
        """Fill in what is known once the step is recorded."""
        if self.taken is not None:
            self.taken.settle()

    def clear(self) -> None:
        """Clear up what a recording that failed has left."""
        for optimizer in self._optimizers:
            optimizer.guard.forget()
        if self.taken is not None:
            self.taken.clear()

    def reduce(self, because: str) -> bool:
        """Take fewer shortcuts after a recording that failed; False where none was taken."""
        if self.taken is None:
            return False
        if not self.taken.simplify():
            self.taken, self._because = None, because
        return True

    def forget(self) -> None:
        """Let go of what recordings have read from: there are none any more."""
        if self.taken is not None:
            self.taken.forget()

    def how(self) -> str:
        """Say why torch's own kernels do it all, where that is not as planned."""
        return f"by torch's own kernels alone: {self._because}" if self._because else ""

    def end(self) -> None:
        """Let go of the shortcuts and their memory."""
        self.taken = None
