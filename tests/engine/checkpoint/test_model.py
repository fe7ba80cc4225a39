"""A model's files: others can load them, ties are kept, and nothing is put back silently wrong."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import nn

from anytrain.core.errors import CheckpointError, Notice
from anytrain.engine.checkpoint import (
    Saved,
    Snapshot,
    Store,
    load,
    load_weights,
    model_state,
)


def saved(root: Path, *models: Any, most_shard_bytes: int = 10**9) -> Path:
    store = Store(root, most_shard_bytes=most_shard_bytes)
    outcome = store.save("x", Snapshot(step=1, models=models))
    assert isinstance(outcome, Saved), str(outcome)
    return outcome.path


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    model = Tied()
    path = saved(tmp_path, model)
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        assert list(file.keys()) == ["embed.weight"]
        assert file.metadata() == {"format": "pt"}
    weights = load(path).model()
    assert weights["head.weight"] is weights["embed.weight"]
    other = Tied()
    load(path).load_model(other)
    assert torch.equal(other.head.weight, model.embed.weight)


def test_views_of_one_memory_that_differ_are_all_kept(tmp_path: Path) -> None:
    model = nn.Module()
    base = torch.arange(12.0).reshape(3, 4)
    for name, view in {"a": base, "b": base.t(), "c": base[1:], "d": base[:1]}.items():
        model.register_buffer(name, view)
    back = load(saved(tmp_path, model)).model()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = {"n": (1, 2)}

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def test_extra_state_and_types_that_safetensors_lacks_come_back(tmp_path: Path) -> None:
    model = Counting()
    model.register_buffer("wide", torch.tensor([1 + 2j], dtype=torch.complex128))
    model.calls = {"n": (7, 8)}
    other = Counting()
    other.register_buffer("wide", torch.zeros(1, dtype=torch.complex128))
    load(saved(tmp_path, model)).load_model(other)
    assert other.calls == {"n": (7, 8)}
    assert torch.equal(other.wide, model.wide)


def test_several_models_keep_their_order(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(3, 3)
    path = saved(tmp_path, one, two.state_dict())
    loaded, other = load(path), nn.Linear(3, 3)
    loaded.load_model(other, 1)
    assert torch.equal(other.weight, two.weight)
    assert torch.equal(loaded.model(0)["weight"], one.weight)
    assert (path / "model_1.safetensors").exists()


def test_weights_that_a_hook_has_changed_are_the_ones_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    changed = {"weight": torch.ones(2, 2)}
    assert load(saved(tmp_path, model_state(model, changed))).model().keys() == {"weight"}


# Loading into a model.


def test_missing_and_unexpected_names_are_errors_that_name_them() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    weights = {"weight": torch.zeros(2, 2), "scale": torch.ones(1)}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, weights, source="x.safetensors")
    assert "x.safetensors lacks bias" in caught.value.why
    assert "no scale" in caught.value.why
    assert torch.equal(model.weight, before)
    assert load_weights(model, weights, strict=False) == (["bias"], ["scale"])
    assert model.weight.sum() == 0


@pytest.mark.parametrize("strict", [True, False])
def test_a_shape_that_does_not_fit_changes_nothing(strict: bool) -> None:
    model = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrong = {"weight": torch.zeros(2, 2), "bias": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"bias is \(3,\) in the file and \(2,\)"):
        load_weights(model, wrong, strict=strict)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_a_name_whose_twin_is_there_is_not_missed() -> None:
    assert load_weights(Tied(), {"head.weight": torch.zeros(5, 3)}) == ([], [])


def test_weights_of_another_type_are_converted_with_a_notice() -> None:
    model = nn.Linear(2, 2)
    half = {name: tensor.half() for name, tensor in model.state_dict().items()}
    with pytest.warns(Notice, match="float16 where the model has torch.float32"):
        load_weights(model, half)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(model, model.state_dict())


# transformers.

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    )


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    return T5ForConditionalGeneration(
        T5Config(**sizes, num_heads=2, decoder_start_token_id=0, tie_word_embeddings=True)
    )


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False))


def _mixtral() -> Any:
    """A model whose weights transformers keeps in another shape than its own files do."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)
    )


AUTO = {
    _bert: "AutoModelForMaskedLM",
    _gpt2: "AutoModelForCausalLM",
    _t5: "AutoModelForSeq2SeqLM",
    _llama: "AutoModelForCausalLM",
    _mixtral: "AutoModelForCausalLM",
}


@pytest.mark.parametrize("make", AUTO, ids=lambda make: make.__name__.strip("_"))
@pytest.mark.parametrize("most_shard_bytes", [10**9, 8000], ids=["one file", "shards"])
def test_transformers_loads_a_checkpoint_as_it_stands(
    tmp_path: Path, make: Any, most_shard_bytes: int
) -> None:
    import transformers

    torch.manual_seed(3)
    model = make()
    path = saved(tmp_path, model, most_shard_bytes=most_shard_bytes)
    auto = getattr(transformers, AUTO[make])
    back, info = auto.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    theirs, ours = back.state_dict(), model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    plain = transformers.AutoModel.from_pretrained(path)
    assert torch.equal(plain.get_input_embeddings().weight, model.get_input_embeddings().weight)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert (path / "model.safetensors.index.json").exists() == (most_shard_bytes == 8000)

    other = make()
    load(path).load_model(other)
    assert all(torch.equal(other.state_dict()[name], ours[name]) for name in ours)


def test_a_generating_model_brings_its_generation_settings(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = _gpt2()
    model.generation_config.max_new_tokens = 17
    path = saved(tmp_path, model)
    assert AutoModelForCausalLM.from_pretrained(path).generation_config.max_new_tokens == 17
