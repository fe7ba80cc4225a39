"""Optimizers by name are those of transformers' Trainer, and so are the decayed parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.training_args import OptimizerNames

from anytrain.core.errors import BadInput, Unsupported
from anytrain.engine.optim.adafactor import Adafactor
from anytrain.engine.optim.build import (
    decay_names,
    names,
    optimizer_class,
    parameter_groups,
    parse_options,
    refused_names,
)

ADAM = {"learning_rate": 3e-4, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-7}


def trainer_of(model: nn.Module, folder: Path, **options: Any) -> transformers.Trainer:
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        learning_rate=3e-4,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-7,
        **options,
    )
    return transformers.Trainer(model, args)


def plain_model() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm1 = nn.GroupNorm(2, 4)
            self.norm = nn.RMSNorm(4)
            self.q_norm = nn.RMSNorm(4)
            self.ln = nn.LayerNorm(4)
            self.bn = nn.BatchNorm1d(4)
            self.RMSNorm_out = nn.RMSNorm(4)
            self.normalizer = nn.Linear(2, 2, bias=False)
            self.scale = nn.Parameter(torch.ones(1))
            self.logit_bias = nn.Parameter(torch.ones(1))
            self.register_parameter("nothing", None)

    model = nn.Module()
    model.blocks = nn.ModuleList([Block(), Block()])
    model.out = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model.tied = model.out[0]
    model.weight = nn.Parameter(torch.ones(2))
    return model


def small(kind: str) -> nn.Module:
    width = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=20, intermediate_size=8, **width)
        return transformers.BertForSequenceClassification(config)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config)
    if kind == "t5":
        config = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=2)
        return transformers.T5ForConditionalGeneration(config)
    if kind == "llama":
        config = transformers.LlamaConfig(vocab_size=20, intermediate_size=8, **width)
        return transformers.LlamaForCausalLM(config)
    if kind == "vit":
        config = transformers.ViTConfig(image_size=8, patch_size=4, intermediate_size=8, **width)
        return transformers.ViTForImageClassification(config)
    if kind == "resnet":
        config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1])
        return transformers.ResNetForImageClassification(config)
    return nn.LayerNorm(4) if kind == "norm" else plain_model()


KINDS = ["bert", "gpt2", "t5", "llama", "vit", "resnet", "plain", "norm"]


@pytest.mark.parametrize("kind", KINDS)
def test_decay_is_for_the_parameters_that_transformers_decays(kind: str, tmp_path: Path) -> None:
    model = small(kind)
    assert decay_names(model) == trainer_of(model, tmp_path).get_decay_parameter_names(model)


@pytest.mark.parametrize("kind", KINDS)
def test_the_groups_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = small(kind)
    for parameter in list(model.parameters())[1:2]:
        parameter.requires_grad_(False)
    theirs = trainer_of(model, tmp_path, weight_decay=0.1).create_optimizer().param_groups
    mine = parameter_groups(model, 0.1)
    assert [group["weight_decay"] for group in mine] == [0.1, 0.0]
    for own, other in zip(mine, theirs, strict=True):
        assert [id(p) for p in own["params"]] == [id(p) for p in other["params"]]
        assert own["weight_decay"] == other["weight_decay"]


def test_the_decayed_parameters_can_be_named() -> None:
    model = nn.Linear(2, 2)
    decayed, rest = parameter_groups(model, 0.1, decay_names=["bias"])
    assert decayed["params"] == [model.bias]
    assert rest["params"][0] is model.weight


def test_a_frozen_model_has_nothing_to_train() -> None:
    with pytest.raises(BadInput, match="nothing to train"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.0)


def test_every_name_of_transformers_is_built_or_refused() -> None:
    assert {kind.value for kind in OptimizerNames} <= {*names(), *refused_names()}
    assert not set(names()) & set(refused_names())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw_torch", ""),
        ("adamw_torch_fused", ""),
        ("adafactor", ""),
        ("sgd", ""),
        ("sgd", "momentum=0.9,nesterov=true"),
        ("adagrad", "lr_decay=0.1, eps=1e-6"),
        ("rmsprop", "momentum=0.5,alpha=0.9,eps=1e-5,centered=True"),
    ],
)
def test_an_optimizer_is_built_as_transformers_builds_it(
    name: str, options: str, tmp_path: Path
) -> None:
    trainer = trainer_of(nn.Linear(2, 2), tmp_path, optim=name, optim_args=options or None)
    other, theirs = transformers.Trainer.get_optimizer_cls_and_kwargs(trainer.args)
    kind, mine = optimizer_class(name, **ADAM, options=parse_options(options), fuses=True)
    assert mine == theirs
    assert kind is (Adafactor if name == "adafactor" else other)


@pytest.mark.parametrize("name", names())
def test_a_built_optimizer_updates_both_groups(name: str) -> None:
    model = nn.Linear(3, 3)
    before = [p.detach().clone() for p in model.parameters()]
    kind, options = optimizer_class(name, **ADAM)
    optimizer = kind(parameter_groups(model, 0.1), **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_where_nothing_fuses_the_choice_is_left_open() -> None:
    _, options = optimizer_class("adamw_torch_fused", **ADAM, fuses=False)
    assert "fused" not in options


@pytest.mark.parametrize("name", refused_names())
def test_a_name_that_is_refused_says_what_to_do(name: str) -> None:
    with pytest.raises(Unsupported, match=r"pass optim="):
        optimizer_class(name, **ADAM)


def test_a_removed_name_says_what_took_its_place() -> None:
    with pytest.raises(Unsupported, match="pass optim='adamw_torch'"):
        optimizer_class("adamw_hf", **ADAM)


@pytest.mark.parametrize(
    ("name", "says"),
    [("adamw_toch", "did you mean optim='adamw_torch'"), ("zzz", "optimizers are")],
)
def test_an_unknown_name_is_refused(name: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        optimizer_class(name, **ADAM)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("sgd", {"momentun": "0.9"}, "its options are momentum, dampening, nesterov"),
        ("sgd", {"momentum": "much"}, "momentum='much': it is a number"),
        ("sgd", {"nesterov": "maybe"}, "nesterov='maybe': it is true or false"),
        ("rmsprop", {"weight_decay": "0.1"}, "each parameter group has its decay"),
    ],
)
def test_a_wrong_option_is_refused(name: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        optimizer_class(name, **ADAM, options=options)


@pytest.mark.parametrize("text", [None, "", "a=1", "a=1, b = two"])
def test_options_are_read_as_transformers_reads_them(text: str | None) -> None:
    from transformers.trainer_optimizer import _parse_optim_args

    assert parse_options(text) == _parse_optim_args(text)


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=1,", "a=1=2", "a=1,a=2"])
def test_options_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="Cannot read"):
        parse_options(text)
