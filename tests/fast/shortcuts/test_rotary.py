"""Which functions are taken for rotary positions, and that the model learns the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import GPTJConfig, GPTJModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import torch_for_kernels
from anytrain.fast.shortcuts import rotary
from anytrain.fast.shortcuts.layers import Sightings
from torch_for_kernels import rounded

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
USUAL = modeling_llama.apply_rotary_pos_emb


def scaled(*given: Any) -> Any:
    return tuple(2 * each for each in USUAL(*given))


def detached(q: Any, *given: Any) -> Any:
    return USUAL(q.detach(), *given)


def rounding(q: Any, *given: Any) -> Any:
    return tuple(turned.to(q.dtype) for turned in USUAL(q, *given))


def test_the_usual_function_is_found_and_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = LlamaForCausalLM(CONFIG)
    assert rotary.rotary_modules(model) == [modeling_llama]
    for other in (scaled, detached, rounding, None, lambda *given: given[0], torch.nn.Identity()):
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)
        assert rotary.rotary_modules(model) == []
    assert rotary.rotary_modules(GPTJModel(GPTJConfig(n_embd=64, n_layer=1, n_head=2))) == []


def test_a_model_whose_module_is_gone_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM(CONFIG)
    monkeypatch.delitem(sys.modules, modeling_llama.__name__)
    assert rotary.rotary_modules(model) == []


@pytest.mark.parametrize("place", ["one for all", "each its own"])
def test_a_model_learns_the_same(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_for_kernels.put_in(monkeypatch)
    torch.manual_seed(0)
    model, words = LlamaForCausalLM(CONFIG), torch.randint(64, (3, 8))
    more = {} if place == "one for all" else {"position_ids": torch.arange(8) + words[:, :1]}
    turned: list[tuple[int, ...]] = []

    def rotate(kernels: Any, inputs: torch.Tensor, *angles: torch.Tensor) -> torch.Tensor:
        turned.append(tuple(inputs.shape))
        return torch_for_kernels.rotate(kernels, inputs, *angles)

    monkeypatch.setattr(rotary, "rotate", rotate)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=words, labels=words, **more).loss
        loss.backward()
        return loss.detach()

    sightings = Sightings(model)
    with sightings.watched():
        expected = run()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with rounded(model, sightings) as halves:
        found = run()
    assert turned == 2 * [(3, 2, 8, 32), (3, 1, 8, 32)]
    assert modeling_llama.apply_rotary_pos_emb is USUAL
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    for name, parameter in model.named_parameters():
        gradient = halves.gradient(parameter)
        assert gradient is not None, name
        torch.testing.assert_close(gradient.float(), grads[name], rtol=5e-2, atol=5e-3)
