"""Arguments can be written down, copied, pickled and replaced, and give away no token."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

from anytrain.core.errors import Unsupported
from anytrain.doors.training_args import (
    AcceleratorConfig,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from anytrain.doors.training_args.legacy import RULES
from anytrain.doors.training_args.support import DIFFERENCES
from launching import run_command

ROOT = Path(__file__).parents[3]
GIVEN: dict[str, Any] = {
    "learning_rate": 1e-4,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "hub_token": "hf_secret",
    "accelerator_config": {"even_batches": False},
    "debug": "underflow_overflow",
    "report_to": "csv",
}


@dataclass
class Extended(TrainingArguments):
    beta: float = 0.1
    extra_token: str = "hidden"
    model_init_kwargs: dict[str, Any] | None = None


def test_as_a_dict_they_are_plain_values() -> None:
    found = TrainingArguments("out", **GIVEN).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["eval_strategy"] == "steps"
    assert type(found["eval_strategy"]) is str
    assert found["debug"] == ["underflow_overflow"]
    assert found["accelerator_config"]["even_batches"] is False
    assert found["hub_token"] == "<HUB_TOKEN>"
    assert not set(found) & set(RULES)


ALIKE: list[dict[str, Any]] = [
    {},
    GIVEN,
    {"eval_strategy": "steps", "logging_steps": 20.0},
    {"eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.2},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
    {"eval_strategy": "epoch", "lr_scheduler_type": "reduce_lr_on_plateau"},
    {"metric_for_best_model": "eval_loss"},
    {"metric_for_best_model": "f1", "greater_is_better": None},
    {"torch_compile_mode": "default"},
    {"include_num_input_tokens_seen": True},
    {"lr_scheduler_kwargs": '{"num_cycles": "2", "x": {"y": "0.5"}, "z": "true"}'},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"output_dir": None},
    {"output_dir": "~/runs"},
    {"warmup_steps": 0.1, "max_steps": 100, "bf16": True},
    {"debug": None, "report_to": None},
]


@pytest.mark.parametrize("given", ALIKE, ids=str)
def test_as_a_dict_they_are_what_those_of_transformers_are(given: dict[str, Any]) -> None:
    given = {"output_dir": "out", **given, "report_to": "none", "use_cpu": True}
    ours = TrainingArguments(**given).to_dict()
    theirs = transformers.TrainingArguments(**given).to_dict()
    different = {name for name, value in theirs.items() if ours[name] != value}
    # theirs takes use_configured_state out of the config it shows
    config = ours["accelerator_config"]
    assert {**theirs["accelerator_config"], "use_configured_state": False} == config
    assert different - {"accelerator_config"} == set(DIFFERENCES)


def test_a_dict_makes_the_same_arguments_again() -> None:
    args = TrainingArguments("out", **{**GIVEN, "hub_token": None})
    again = TrainingArguments(**{**args.to_dict(), "hub_token": None})
    assert again == args


def test_no_token_is_printed() -> None:
    for args in (TrainingArguments("out", **GIVEN), Extended("out", hub_token="hf_secret")):
        for text in (str(args), repr(args), args.to_json_string(), str(args.to_sanitized_dict())):
            assert "hf_secret" not in text


def test_sanitized_they_are_numbers_and_text() -> None:
    found = TrainingArguments("out", **GIVEN).to_sanitized_dict()
    assert {type(value) for value in found.values()} <= {bool, int, float, str}
    assert found["train_batch_size"] == 8


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        lambda args: pickle.loads(pickle.dumps(args)),
    ],
)
def test_a_copy_is_the_same(again: Any) -> None:
    args = TrainingArguments("out", **GIVEN)
    assert args.device.type  # an opened session does not travel
    other = again(args)
    assert other == args
    assert str(other) == str(args)
    assert other.device == args.device


def test_asdict_and_replace_work() -> None:
    args = Seq2SeqTrainingArguments("out", **GIVEN)
    assert dataclasses.asdict(args)["accelerator_config"]["even_batches"] is False
    other = dataclasses.replace(args, seed=1, eval_strategy="epoch")
    assert (other.seed, other.eval_strategy, args.seed) == (1, "epoch", 42)


def test_a_subclass_adds_fields_of_its_own() -> None:
    import torch

    args = Extended("out", beta=0.2, model_init_kwargs={"dtype": torch.bfloat16})
    found = args.to_dict()
    assert found["beta"] == 0.2
    assert found["extra_token"] == "<EXTRA_TOKEN>"
    assert found["model_init_kwargs"] == {"dtype": "bfloat16"}
    assert dataclasses.replace(args, beta=0.3).beta == 0.3


def test_the_generation_config_is_written_as_a_dict() -> None:
    config = transformers.GenerationConfig(max_length=7)
    args = Seq2SeqTrainingArguments("out", generation_config=config)
    assert args.to_dict()["generation_config"]["max_length"] == 7


def test_an_accelerator_config_may_be_a_file_or_that_of_transformers(tmp_path: Path) -> None:
    from transformers.trainer_pt_utils import AcceleratorConfig as Theirs

    file = tmp_path / "config.json"
    file.write_text('{"split_batches": true}')
    for given in (str(file), Theirs(split_batches=True), AcceleratorConfig(split_batches=True)):
        args = TrainingArguments("out", accelerator_config=given)  # type: ignore[arg-type]
        assert args.accelerator_config == AcceleratorConfig(split_batches=True)
    assert AcceleratorConfig.from_json_file(file).split_batches


def test_the_class_of_an_accelerator_config_is_none() -> None:
    with pytest.raises(Unsupported, match="a callable to `accelerator_config`"):
        TrainingArguments("out", accelerator_config=AcceleratorConfig)  # type: ignore[arg-type]


def test_the_page_of_arguments_is_up_to_date() -> None:
    import sys

    run_command([sys.executable, "tools/arguments.py", "--check"], cwd=ROOT)
