"""Real models learn the same from rounded weights whether sums are put off or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import torch_for_kernels
from anytrain.fast.shortcuts import layers, norms
from anytrain.fast.shortcuts.layers import Sightings
from torch_for_kernels import rounded

patching = pytest.MonkeyPatch.context
WORDS = 100
ROUNDING = 2**-8
"""A step of bfloat16: gradients of one tensor may be added up in another order."""
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
READER = {"vocab_size": WORDS, **SMALL}
GPT = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 2}
BART = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32, **READER}
DISTILBERT = {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
BLOOM = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 2,
    "hidden_dropout": 0.1,
}
VIT = {"image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.1, **SMALL}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "BertForMaskedLM": ("BertConfig", READER, 4),
    "BertForSequenceClassification": ("BertConfig", READER, 4),
    "DistilBertForMaskedLM": ("DistilBertConfig", DISTILBERT, 4),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", READER, 4),
    "GPT2LMHeadModel": ("GPT2Config", GPT, 4),
    "BloomForCausalLM": ("BloomConfig", BLOOM, 4),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {"hidden_dropout": 0.1, **READER}, 0),
    "OPTForCausalLM": ("OPTConfig", OPT, 0),
    "LlamaForCausalLM": ("LlamaConfig", READER, 4),
    "T5ForConditionalGeneration": ("T5Config", T5, 10),
    "BartForConditionalGeneration": ("BartConfig", BART, 10),
    "ViTForImageClassification": ("ViTConfig", VIT, 4),
}
"""Each model's configuration, and how many of its norms add, too."""


def batch(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([0, 1, 0])
    if "Image" in name:
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator), "labels": labels}
    words = torch.randint(5, WORDS, (3, 8), generator=generator)
    return {"input_ids": words, "labels": labels if "Classification" in name else words}


def built(name: str, checkpointed: dict[str, bool] | None) -> Any:
    config, given, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**given)).train()
    if checkpointed is not None:
        model.gradient_checkpointing_enable(checkpointed)
    return model


def step(name: str, model: Any) -> torch.Tensor:
    """Compute a model's gradients; return its loss."""
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch(name)).loss
    loss.backward()
    return loss.detach()


def run(name: str, checkpointed: dict[str, bool] | None, *, puts_off: bool) -> Any:
    """Return a model's loss and gradients, and how many layer norms have added, too."""
    model = built(name, checkpointed)
    sightings = Sightings(model)
    with sightings.watched():
        step(name, model)
    model.zero_grad()
    added: list[bool] = []

    def forward(*given: Any) -> Any:
        added.append(len(given) > 5)
        return torch_for_kernels.norm_forward(*given)

    with rounded(model, sightings, puts_off=puts_off) as halves, patching() as patch:
        patch.setattr(norms, "norm_forward", forward)
        loss = step(name, model)
    grads = {n: halves.gradient(p) for n, p in model.named_parameters()}
    return loss, grads, sum(added)


TWICE = pytest.mark.parametrize("checkpointed", [None, False, True], ids=["whole", "twice", "hand"])


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_for_kernels.put_in(monkeypatch)
    monkeypatch.setattr(layers, "_VOCABULARY", WORDS)


@TWICE
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_the_same_whatever_is_put_off(name: str, checkpointed: bool | None) -> None:
    how = None if checkpointed is None else {"use_reentrant": checkpointed}
    expected = run(name, how, puts_off=False)
    found = run(name, how, puts_off=True)
    assert expected[2] == 0
    assert found[2] == MODELS[name][2] or checkpointed is not None
    assert_close(found, expected, ROUNDING)


@TWICE
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_as_under_autocast(name: str, checkpointed: bool | None) -> None:
    model = built(name, None)
    expected = step(name, model), {n: p.grad for n, p in model.named_parameters()}
    how = None if checkpointed is None else {"use_reentrant": checkpointed}
    assert_close(run(name, how, puts_off=True), expected, 8 * ROUNDING)


def assert_close(found: Any, expected: Any, rounding: float) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=rounding / 100, atol=1e-5)
    largest = max(float(g.abs().max()) for g in expected[1].values() if g is not None)
    for parameter, gradient in found[1].items():
        other = expected[1][parameter]
        assert (gradient is None) == (other is None), parameter
        if gradient is not None:
            worst = float((gradient.float() - other.float()).abs().max())
            assert worst <= rounding * max(float(other.abs().max()), 0.01 * largest), parameter
