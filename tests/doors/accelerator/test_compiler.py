"""The compiler that was asked for is the one that compiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend

from anytrain import Accelerator

used: list[str] = []


@register_backend(name="noted")
def _noted(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    used.append("noted")
    return module.forward


@pytest.mark.parametrize("name", ["ANYTRAIN_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_BACKEND"])
def test_a_variable_names_the_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used.clear()
    torch._dynamo.reset()
    monkeypatch.setenv(name, "noted")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))(torch.ones(1, 2))
    assert used == ["noted"]
    assert name in accelerator.plan.step.because
