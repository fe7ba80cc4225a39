"""What every way to share a model among ranks offers.

INVARIANT: losses, gradient norms, samples and saved weights are those of one process with the whole
batch; callers never ask which strategy it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from anytrain.core.facts import MemoryForecast, ModelFacts


@dataclass(frozen=True, slots=True)
class Part:
    """What lies on this rank of one tensor of a model or an optimizer."""

    name: str
    """Its name in the state dict: `0.weight`, or `state.3.exp_avg` of an optimizer."""
    tensor: torch.Tensor
    start: tuple[int, ...]
    """Where its first element is in the whole tensor."""
    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    writer: int
    """The rank that saves it: of those that hold the same, one."""


class Strategy(Protocol):
    """How the ranks of a job train one model together."""

    @property
    def name(self) -> str:
        """Its name in the table and in the plan."""

    def place(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """Return the model as the ranks train it, with rank 0's weights on all of them.

        The model is on its device already. `options` are those of DistributedDataParallel.
        """

    def original(self, model: nn.Module) -> nn.Module:
        """Return what was given to `place`."""

    def accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let gradients add up on each rank inside the block; nothing is sent."""

    def share_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average the gradients of the next backward, though its forward ran while accumulating."""

    def end_backward(self, model: nn.Module) -> str | None:
        """Complete a step's gradients where some may go unused; say what was learnt of it."""

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients that were computed while accumulating, once all are there."""

    def norm(self, gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of the whole gradient, of which these are what lies on this rank."""

    def end_update(self, model: nn.Module) -> None:
        """Share what ranks have learnt apart, after an update; HF's `LocalSGD` calls it."""

    def parts(self, *held: nn.Module | Optimizer) -> Iterator[Part]:
        """Yield what lies on this rank of models and optimizers, each tensor once."""

    def load(self, held: nn.Module | Optimizer, state: Mapping[str, Any]) -> None:
        """Put a whole state dict back: of each tensor, what lies on this rank.

        A model may lack some names, or have more; whoever calls has looked at both.
        """

    def forecast(self, facts: ModelFacts, options: Mapping[str, Any]) -> MemoryForecast:
        """Return what each rank will hold of a model that is to be placed with these options."""

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Let ranks run out of batches at different times inside the block."""
