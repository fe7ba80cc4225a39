"""Names of transformers 4.x are taken, answered with one line, or refused; never lost."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest

from anytrain.core.errors import BadInput, Notice, Unsupported
from anytrain.doors.training_args import Seq2SeqTrainingArguments, TrainingArguments
from anytrain.doors.training_args.legacy import RULES

# old name, its value, the new name, its value
TAKEN = [
    ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
    ("evaluate_during_training", True, "eval_strategy", "steps"),
    ("per_gpu_train_batch_size", 4, "per_device_train_batch_size", 4),
    ("per_gpu_eval_batch_size", 4, "per_device_eval_batch_size", 4),
    ("warmup_ratio", 0.1, "warmup_steps", 0.1),
    ("group_by_length", True, "train_sampling_strategy", "group_by_length"),
    ("adafactor", True, "optim", "adafactor"),
    ("no_cuda", True, "use_cpu", True),
    ("torchdynamo", "eager", "torch_compile_backend", "eager"),
    ("xpu_backend", "gloo", "ddp_backend", "gloo"),
    ("include_inputs_for_metrics", True, "include_for_metrics", ["inputs"]),
    ("include_tokens_per_second", True, "include_num_input_tokens_seen", "all"),
    ("push_to_hub_model_id", "me/model", "hub_model_id", "me/model"),
    ("push_to_hub_token", "secret", "hub_token", "secret"),
]
HARMLESS: list[tuple[str, Any]] = [
    ("save_safetensors", True),
    ("fp16_backend", "auto"),
    ("half_precision_backend", "cuda_amp"),
    ("fp16_opt_level", "O1"),
    ("past_index", -1),
    ("ray_scope", "last"),
    ("warmup_ratio", 0.0),
    ("no_cuda", False),
    ("group_by_length", False),
    ("use_mps_device", False),
    ("sharded_ddp", ""),
    ("sharded_ddp", []),
    ("fsdp_min_num_params", 0),
    ("mp_parameters", ""),
    ("use_ipex", False),
    ("jit_mode_eval", False),
]
REFUSED: list[tuple[str, Any]] = [
    ("save_safetensors", False),
    ("fp16_backend", "apex"),
    ("past_index", 0),
    ("ray_scope", "all"),
    ("use_ipex", True),
    ("jit_mode_eval", True),
    ("tpu_metrics_debug", True),
    ("model_parallel", True),
    ("sharded_ddp", "simple"),
    ("fsdp_min_num_params", 1000),
    ("fsdp_transformer_layer_cls_to_wrap", "BertLayer"),
    ("mp_parameters", "a=b"),
]


@pytest.mark.parametrize(("old", "value", "new", "taken"), TAKEN, ids=[t[0] for t in TAKEN])
def test_an_old_name_is_taken_for_the_new_one(old: str, value: Any, new: str, taken: Any) -> None:
    with pytest.warns(Notice, match=f"^{old} is an old name: taken as {new}"):
        args = TrainingArguments("out", **{old: value})
    assert getattr(args, new) == taken
    assert getattr(args, old) is None


@pytest.mark.parametrize(("old", "value"), HARMLESS)
def test_an_old_value_that_asks_for_nothing_says_nothing(old: str, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = TrainingArguments("out", **{old: value})
    assert args == TrainingArguments("out")


@pytest.mark.parametrize(("old", "value"), REFUSED)
def test_an_old_wish_that_cannot_be_met_is_refused(old: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=old) as told:
        TrainingArguments("out", **{old: value})
    assert told.value.why
    assert told.value.fix


def test_use_mps_device_is_accepted_and_no_longer_needed() -> None:
    with pytest.warns(Notice, match="use_mps_device=True changes nothing: it is no longer needed"):
        args = TrainingArguments("out", use_mps_device=True)
    assert args == TrainingArguments("out")


@pytest.mark.parametrize(
    ("old", "value"),
    [("tpu_num_cores", 8), ("fp16_opt_level", "O2"), ("use_legacy_prediction_loop", True)],
)
def test_an_old_name_with_nothing_left_to_change_says_so(old: str, value: Any) -> None:
    with pytest.warns(Notice, match=f"{old}=.* changes nothing"):
        TrainingArguments("out", **{old: value})


def test_every_old_name_is_tried_here() -> None:
    others = {"use_mps_device", "tpu_num_cores", "fp16_opt_level", "use_legacy_prediction_loop"}
    others |= {"dispatch_batches", "split_batches", "push_to_hub_organization"}
    tried = {t[0] for t in TAKEN} | {t[0] for t in REFUSED} | others
    assert set(RULES) - tried == {"half_precision_backend"}  # as fp16_backend


@pytest.mark.parametrize("name", ["dispatch_batches", "split_batches"])
def test_old_loader_options_go_to_the_accelerator_config(name: str) -> None:
    with pytest.warns(Notice, match=f"{name} is an old name"):
        args = TrainingArguments("out", **{name: True})
    assert getattr(args.accelerator_config, name) is True


def test_an_organization_is_put_before_the_repository() -> None:
    with pytest.warns(Notice, match="hub_model_id='us/run'"):
        args = TrainingArguments("somewhere/run", push_to_hub_organization="us")
    assert args.hub_model_id == "us/run"


def test_a_token_under_its_old_name_is_not_printed() -> None:
    with pytest.warns(Notice) as told:
        args = TrainingArguments("out", push_to_hub_token="hf_secret")
    assert "hf_secret" not in str(told[0].message)
    assert "hf_secret" not in str(args)


def test_two_names_that_disagree_are_refused() -> None:
    with pytest.raises(BadInput, match="evaluation_strategy='epoch' and eval_strategy="):
        TrainingArguments("out", evaluation_strategy="epoch", eval_strategy="steps")
    with pytest.raises(BadInput, match="warmup_ratio=0.1 and warmup_steps=10"):
        TrainingArguments("out", warmup_ratio=0.1, warmup_steps=10)


def test_a_warmup_ratio_of_one_warms_up_for_all_steps() -> None:
    with pytest.warns(Notice, match="warmup_ratio"):
        args = TrainingArguments("out", warmup_ratio=1.0)
    assert args.get_warmup_steps(1000) == 1000


def test_a_warmup_ratio_out_of_range_is_refused() -> None:
    with pytest.raises(BadInput, match="warmup_ratio=1.5"):
        TrainingArguments("out", warmup_ratio=1.5)


def test_an_old_optimizer_is_taken_for_torchs() -> None:
    with pytest.warns(Notice, match="optim='adamw_hf' is an old name"):
        assert TrainingArguments("out", optim="adamw_hf").optim == "adamw_torch"


def test_replacing_a_field_does_not_take_an_old_name_twice() -> None:
    with pytest.warns(Notice):
        args = TrainingArguments("out", group_by_length=True, warmup_ratio=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = dataclasses.replace(args, train_sampling_strategy="random", warmup_steps=5)
    assert other.train_sampling_strategy == "random"
    assert other.warmup_steps == 5


def test_an_old_name_that_is_assigned_later_is_taken_too() -> None:
    args = TrainingArguments("out")
    with pytest.warns(Notice, match="group_by_length is an old name"):
        args.group_by_length = True
    assert args.train_sampling_strategy == "group_by_length"


def test_a_notice_points_at_the_line_that_made_the_arguments() -> None:
    with pytest.warns(Notice) as told:
        TrainingArguments("out", use_mps_device=True)
    assert told[0].filename == __file__


def test_overwrite_output_dir_and_logging_dir_stay_readable() -> None:
    args = TrainingArguments("out", overwrite_output_dir=True, logging_dir="logs")
    assert args.overwrite_output_dir
    assert args.logging_dir == "logs"


def test_sortish_sampler_says_what_to_use_instead() -> None:
    with pytest.warns(Notice, match="sortish_sampler=True changes nothing.*group_by_length"):
        args = Seq2SeqTrainingArguments("out", sortish_sampler=True)
    assert not args.sortish_sampler
