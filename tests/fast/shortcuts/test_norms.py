"""Which modules are taken for an RMS norm, and which are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from anytrain.fast.kernels.step import Norm
from anytrain.fast.shortcuts.norms import norms_of

WIDTH = 256


class ClippedNorm(LlamaRMSNorm):
    """An RMS norm whose result has bounds that few values reach."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).clamp(-2, 2)


class OneWayNorm(LlamaRMSNorm):
    """An RMS norm through whose scale no gradient goes."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scale = inputs.pow(2).mean(-1, keepdim=True).add(self.variance_epsilon).rsqrt()
        return self.weight * (inputs * scale.detach())


class MistakenNorm(LlamaRMSNorm):
    """An RMS norm that says of its epsilon what is not so."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(inputs, (WIDTH,), self.weight, 10 * self.variance_epsilon)


class CountingNorm(LlamaRMSNorm):
    """An RMS norm that keeps something of its own."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("norm", "epsilon"),
    [
        (LlamaRMSNorm(WIDTH, eps=1e-5), 1e-5),
        (Olmo2RMSNorm(WIDTH), 1e-6),
        (T5LayerNorm(WIDTH), 1e-6),
        (nn.RMSNorm(WIDTH, eps=1e-4), 1e-4),
        (nn.RMSNorm(WIDTH), torch.finfo(torch.float32).eps),
        (GemmaRMSNorm(WIDTH), None),
        (nn.RMSNorm(WIDTH, elementwise_affine=False), None),
        (nn.RMSNorm((2, WIDTH)), None),
        (ClippedNorm(WIDTH), None),
        (OneWayNorm(WIDTH), None),
        (MistakenNorm(WIDTH), None),
        (nn.BatchNorm1d(WIDTH), None),
        (nn.GroupNorm(2, WIDTH), None),
    ],
    ids=lambda given: type(given).__name__,
)
def test_an_rms_norm_is_told_by_what_it_computes(norm: nn.Module, epsilon: float | None) -> None:
    found = norms_of(norm)
    assert [(known.kind, known.epsilon) for known in found] == (
        [] if epsilon is None else [(Norm(WIDTH, is_centered=False), epsilon)]
    )


class HoardingNorm(LlamaRMSNorm):
    """An RMS norm that keeps what it made, in a list that it was given."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.made: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made, result = self.made, super().forward(inputs)
        made.append(result)
        return result


class SampleNorm(LlamaRMSNorm):
    """An RMS norm over all of a sample, which is a row where there are two dimensions."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        spread = inputs.flatten(1).pow(2).mean(1).view(-1, *[1] * (inputs.dim() - 1))
        return self.weight * inputs * torch.rsqrt(spread + self.variance_epsilon)


class RoundingNorm(LlamaRMSNorm):
    """An RMS norm whose result is rounded."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).bfloat16()


@pytest.mark.parametrize("kind", [CountingNorm, HoardingNorm, SampleNorm, RoundingNorm])
def test_a_norm_that_does_more_or_otherwise_is_left_alone_without_a_trace(kind: Any) -> None:
    norm, before = kind(WIDTH), torch.get_rng_state()
    weight = norm.weight
    assert not norms_of(norm)
    assert getattr(norm, "calls", 0) == 0 and getattr(norm, "made", []) == []
    assert norm.weight is weight and weight.grad is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("width", "parts", "warps"),
    [
        (128, 1, 1),
        (768, 6, 1),
        (1024, 8, 1),
        (1280, 5, 2),
        (1536, 3, 4),
        (2048, 4, 4),
        (4096, 8, 4),
    ],
)
def test_a_row_has_as_many_warps_as_it_needs(width: int, parts: int, warps: int) -> None:
    assert (Norm(width).num_parts, Norm(width).num_warps) == (parts, warps)


@pytest.mark.parametrize("width", [0, 64, 576, 1408, 8192])
def test_there_is_no_kernel_for_odd_and_very_wide_rows(width: int) -> None:
    assert Norm(width).num_warps == 0
