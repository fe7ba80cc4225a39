"""A step that does not fit the memory is begun again with fewer activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.engine.step.activations import Activations
from anytrain.engine.step.out_of_memory import FewerActivations
from engine.step.test_blocks import stack


class Full(RuntimeError):
    """What a full memory raises here."""


class Tried:
    """A step whose attempts are one function, and which counts how often it was cleared."""

    def __init__(self, attempt: Callable[[], torch.Tensor]) -> None:
        self.attempt, self.num_cleared = attempt, 0

    def add_up(self, batch: Any) -> torch.Tensor:
        return self.attempt()

    def clear(self) -> None:
        self.num_cleared += 1


def fewer(model: nn.Module, **given: Any) -> FewerActivations:
    return FewerActivations(
        Activations(model),
        lambda error: isinstance(error, Full),
        release=lambda: None,
        keep_rng=lambda: (lambda state: lambda: torch.set_rng_state(state))(torch.get_rng_state()),
        **given,
    )


def test_a_step_runs_again_until_it_fits_from_the_same_random_numbers() -> None:
    model, told, drawn = stack(4), [], []
    fitting = fewer(model, changed=lambda: told.append(fitting.activations.num_checkpointed))

    def attempt() -> torch.Tensor:
        drawn.append(torch.rand(()))
        if fitting.activations.num_checkpointed < 4:
            raise Full
        return drawn[-1]

    step = Tried(attempt)
    assert fitting.gradients(step, None) is drawn[-1]
    assert told == [2, 4] and step.num_cleared == 2
    assert len({float(each) for each in drawn}) == 1


def test_a_memory_that_stays_full_and_other_errors_come_through() -> None:
    def raises(error: Exception) -> Tried:
        def attempt() -> torch.Tensor:
            raise error

        return Tried(attempt)

    with pytest.raises(Full):
        fewer(stack(4)).gradients(raises(Full()), None)
    fitting = fewer(stack(4))
    with pytest.raises(ValueError, match="shape"):
        fitting.gradients(raises(ValueError("shape")), None)
    assert fitting.activations.num_checkpointed == 0
