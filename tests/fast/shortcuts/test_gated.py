"""Which modules are taken for a gated middle, and that it computes what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, LlamaConfig, Qwen2Config
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

import torch_for_kernels
from anytrain.fast.shortcuts import gated as ours
from anytrain.fast.shortcuts.gated import is_gated
from anytrain.fast.shortcuts.layers import Sightings
from torch_for_kernels import rounded

SIZES: Any = {"hidden_size": 32, "intermediate_size": 64}


class Scaled(LlamaMLP):
    """One whose product is scaled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(2 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Residual(LlamaMLP):
    """One that adds its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class OneWay(LlamaMLP):
    """One whose gate gets no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))


class Shifted(LlamaMLP):
    """One whose layers read different things."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x + 1))


class Turned(LlamaMLP):
    """One whose product is written the other way round, step by step."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        values = self.up_proj(hidden)
        return self.down_proj(values.mul(self.act_fn(self.gate_proj(hidden))))


class Cast(LlamaMLP):
    """One that gives its result in its input's precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(x.dtype)


class Whole(LlamaMLP):
    """One whose product is in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).float()) * self.up_proj(x).float())


class Long(LlamaMLP):
    """One that looks at how long its texts are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(product / len(x[0]) if x.dim() == 3 else product)


class Keeping(LlamaMLP):
    """One that keeps its product for a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        vars(self).update(penalty=product.abs().mean())
        return self.down_proj(product)


def with_a_hook() -> nn.Module:
    made = LlamaMLP(LlamaConfig(**SIZES))
    made.act_fn.register_forward_hook(lambda *given: None)
    return made


@pytest.mark.parametrize(
    ("module", "is_one"),
    [
        (LlamaMLP(LlamaConfig(**SIZES)), True),
        (LlamaMLP(LlamaConfig(mlp_bias=True, **SIZES)), True),
        (Qwen2MLP(Qwen2Config(**SIZES)), True),
        (Turned(LlamaConfig(**SIZES)), True),
        (GemmaMLP(GemmaConfig(**SIZES)), False),
        (LlamaMLP(LlamaConfig(hidden_act="relu", **SIZES)), False),
        (Scaled(LlamaConfig(**SIZES)), False),
        (Residual(LlamaConfig(**SIZES)), False),
        (OneWay(LlamaConfig(**SIZES)), False),
        (Shifted(LlamaConfig(**SIZES)), False),
        (Cast(LlamaConfig(**SIZES)), False),
        (Whole(LlamaConfig(**SIZES)), False),
        (Long(LlamaConfig(**SIZES)), False),
        (Keeping(LlamaConfig(**SIZES)), False),
        (with_a_hook(), False),
        (nn.Linear(8, 8), False),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_gated_middle_is_told_by_what_it_computes(module: nn.Module, is_one: bool) -> None:
    assert is_gated(module) is is_one


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_for_kernels.put_in(monkeypatch)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("late_hook", [True, False])
@pytest.mark.usefixtures("_as_on_a_gpu")
def test_its_values_and_gradients_are_autocasts(
    joined: bool, late_hook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, inputs = LlamaMLP(LlamaConfig(**SIZES)), torch.randn(2, 5, 32)
    gates: list[tuple[int, ...]] = []

    def gate(kernels: Any, opens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        gates.append(tuple(opens.shape))
        return torch_for_kernels.gate(kernels, opens, values)

    monkeypatch.setattr(ours, "gate", gate)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(inputs).float().square().sum()
        loss.backward()
        return loss.detach()

    sightings = Sightings(model)
    with sightings.watched():
        expected = run()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    seen: list[Any] = []
    with rounded(model, sightings, joined=joined) as halves:
        if late_hook:
            model.act_fn.register_forward_hook(lambda *given: seen.append(given))
        torch.testing.assert_close(run(), expected)
    assert (len(seen), gates) == ((1, []) if late_hook else (0, [(10, 64)]))
    for name, parameter in model.named_parameters():
        gradient = halves.gradient(parameter)
        assert gradient is not None, name
        torch.testing.assert_close(gradient.float(), grads[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("change", ["activation", "own forward"])
@pytest.mark.usefixtures("_as_on_a_gpu")
def test_a_module_that_has_changed_is_looked_at_again(change: str) -> None:
    torch.manual_seed(0)
    model, inputs = LlamaMLP(LlamaConfig(**SIZES)), torch.randn(2, 5, 32)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(inputs).float().square().sum()

    with rounded(model) as halves:
        loss()
    if change == "activation":
        model.act_fn = nn.ReLU()
    else:
        vars(model)["forward"] = lambda x: 2 * x
    expected, own = loss(), vars(model).get("forward")
    halves.look_again()
    with halves.used():
        torch.testing.assert_close(loss(), expected, rtol=1e-2, atol=1e-2)
    assert vars(model).get("forward") is own
