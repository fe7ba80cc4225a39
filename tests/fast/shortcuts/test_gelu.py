"""Which modules are taken for a GELU, and which are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import activations

from anytrain.fast.shortcuts.gelu import FORMS, form_of

TANH, EXACT = FORMS


class NoisyGELU(nn.Module):
    """A GELU that draws random numbers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.gelu(inputs), 0.5)


class WeightedGELU(nn.Module):
    """A GELU with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * functional.gelu(inputs)


class CountingGELU(nn.Module):
    """A GELU that keeps something."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return functional.gelu(inputs)


@pytest.mark.parametrize(
    ("module", "form"),
    [
        (activations.NewGELUActivation(), TANH),
        (activations.FastGELUActivation(), TANH),
        (activations.AccurateGELUActivation(), TANH),
        (activations.GELUActivation(use_gelu_python=True), EXACT),
        (nn.GELU(), EXACT),
        (nn.GELU("tanh"), TANH),
        (activations.QuickGELUActivation(), None),
        (activations.ClippedGELUActivation(-100, 100), None),
        (NoisyGELU(), None),
        (WeightedGELU(), None),
        (nn.ReLU(), None),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_gelu_is_told_by_what_it_computes(module, form):
    assert form_of(module) is form


def test_a_module_that_somebody_looks_at_keeps_its_own_forward():
    module = nn.GELU()
    module.register_forward_hook(lambda *given: None)
    assert form_of(module) is None


def test_trying_a_module_leaves_no_trace():
    before, module = torch.get_rng_state(), CountingGELU()
    form_of(NoisyGELU())
    form_of(module)
    assert torch.equal(torch.get_rng_state(), before)
    assert module.calls == 0
