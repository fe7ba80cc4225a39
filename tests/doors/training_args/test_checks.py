"""What cannot work is refused before a model is loaded, with why and what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from anytrain.core.errors import AnytrainError, BadInput, BadType, Unsupported
from anytrain.doors.training_args import (
    IntervalStrategy,
    OptimizerNames,
    SchedulerType,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from anytrain.doors.training_args.support import RUNNING, table

NAN = float("nan")
WRONG: list[dict[str, Any]] = [
    {"learning_rate": -1e-5},
    {"learning_rate": NAN},
    {"learning_rate": "fast"},
    {"per_device_train_batch_size": 0},
    {"per_device_train_batch_size": 2.5},
    {"per_device_eval_batch_size": -8},
    {"gradient_accumulation_steps": 0},
    {"num_train_epochs": -1},
    {"num_train_epochs": NAN},
    {"max_grad_norm": -1},
    {"weight_decay": -0.1},
    {"adam_beta1": 1.0},
    {"adam_beta2": -0.1},
    {"adam_epsilon": -1e-8},
    {"label_smoothing_factor": 1.1},
    {"neftune_noise_alpha": -5},
    {"warmup_steps": -1},
    {"warmup_steps": 10.5},
    {"logging_steps": 0},
    {"logging_steps": 1.5},
    {"logging_steps": -10},
    {"save_steps": 0},
    {"save_steps": -1},
    {"eval_strategy": "steps", "eval_steps": -5},
    {"eval_strategy": "steps", "eval_steps": 2.5},
    {"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": 0},
    {"seed": -1},
    {"seed": 2**32},
    {"data_seed": -1},
    {"torch_empty_cache_steps": 0},
    {"eval_accumulation_steps": 0},
    {"bf16": True, "fp16": True},
    {"bf16": True, "precision": "fp16"},
    {"fp16": True, "precision": "auto"},
    {"precision": "fp8"},
    {"bf16_full_eval": True, "fp16_full_eval": True},
    {"lr_scheduler_type": "reduce_lr_on_plateau"},
    {"lr_scheduler_type": "greedy"},
    {"lr_scheduler_kwargs": "power=2"},
    {"lr_scheduler_kwargs": "{power: 2"},
    {"save_strategy": "best"},
    {"save_strategy": "best", "eval_strategy": "epoch"},
    {"load_best_model_at_end": True},
    {"load_best_model_at_end": True, "eval_strategy": "epoch"},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 300},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1},
    {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 0.2,
        "save_steps": 0.3,
    },
    {"dataloader_prefetch_factor": 2},
    {"dataloader_persistent_workers": True},
    {"dataloader_multiprocessing_context": "spawn"},
    {"dataloader_num_workers": -1},
    {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "thread"},
    {"include_for_metrics": ["input"]},
    {"include_num_input_tokens_seen": "some"},
    {"train_sampling_strategy": "sorted"},
    {"log_level": "loud"},
    {"on_nonfinite": "ignore"},
    {"torch_compile_mode": "fast"},
    {"ddp_backend": "ncll"},
    {"ddp_timeout": 0},
    {"report_to": "comet_ml"},
    {"report_to": ["tensorbord"]},
    {"optim_args": "momentum:0.9"},
    {"debug": "everything"},
    {"debug": True},
    {"debug": "tpu_metrics_debug"},
    {"enable_jit_checkpoint": True, "save_on_signal": False},
    {"push_to_hub": True, "hub_model_id": "a/b/c"},
    {"accelerator_config": {"split_batch": True}},
    {"accelerator_config": "nowhere.json"},
    {"accelerator_config": {"gradient_accumulation_kwargs": {"steps": 2}}},
    {
        "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}},
        "gradient_accumulation_steps": 4,
    },
    {"bf16": "maybe"},
    {"max_steps": "ten"},
    {"seed": None},
    {"seed": True},
]


@pytest.mark.parametrize("given", WRONG, ids=[str(given) for given in WRONG])
def test_what_cannot_work_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(AnytrainError) as told:
        TrainingArguments("out", **given)
    assert told.value.why
    assert told.value.fix
    assert isinstance(told.value, ValueError | TypeError | NotImplementedError)


RIGHT: list[dict[str, Any]] = [
    {"learning_rate": 0},
    {"num_train_epochs": 0},
    {"num_train_epochs": -1, "max_steps": 10},
    {"max_grad_norm": 0},
    {"logging_strategy": "no", "logging_steps": 0},
    {"save_strategy": "no", "save_steps": -1},
    {"logging_steps": 0.1, "save_steps": 0.5},
    {"eval_strategy": "steps", "load_best_model_at_end": True, "eval_steps": 250},
    {
        "eval_strategy": "steps",
        "load_best_model_at_end": True,
        "eval_steps": 0.1,
        "save_steps": 0.3,
    },
    {"eval_strategy": "epoch", "save_strategy": "best", "load_best_model_at_end": True},
    {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "f1"},
    {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    {"bf16": True, "precision": "bf16"},
    {"average_tokens_across_devices": False},
    {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"},
    {"debug": "underflow_overflow"},
    {"report_to": "none"},
    {"fsdp": ""},
    {"fsdp": False, "fsdp_config": {}},
]


@pytest.mark.parametrize("given", RIGHT, ids=[str(given) for given in RIGHT])
def test_what_can_work_is_accepted(given: dict[str, Any]) -> None:
    TrainingArguments("out", **given).check()


@pytest.mark.parametrize(
    "given",
    [
        {"fsdp": True},
        {"fsdp": "full_shard auto_wrap"},
        {"fsdp_config": {"version": 2}},
        {"deepspeed": "ds.json"},
        {"parallelism_config": object()},
        {"use_liger_kernel": True},
        {"liger_kernel_config": {"rope": True}},
        {"optim_target_modules": ["attn"]},
    ],
    ids=lambda given: ", ".join(given),
)
def test_an_engine_that_is_not_here_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        TrainingArguments("out", **given)


def test_every_argument_that_the_table_refuses_is_tried_above() -> None:
    refused = {name for name, support in table().items() if support.kind == "refused"}
    assert refused >= {"fsdp", "deepspeed", "parallelism_config", "use_liger_kernel"}


@pytest.mark.parametrize("name", [m.value for m in OptimizerNames if m not in RUNNING])
def test_an_optimizer_that_does_not_run_is_refused_or_replaced(name: str) -> None:
    if name in ("adamw_hf", "adamw_apex_fused"):
        return
    with pytest.raises(Unsupported, match=name) as told:
        TrainingArguments("out", optim=name)
    assert "adafactor" in told.value.fix


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ({"lr_scheduler_type": "cosin"}, "cosine"),
        ({"optim": "adamw_torch_fuse"}, "adamw_torch_fused"),
        ({"eval_strategy": "epochs"}, "epoch"),
        ({"hub_strategy": "every_saves"}, "every_save"),
        ({"report_to": "tensorbord"}, "tensorboard"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest_known_one(
    given: dict[str, str], near: str
) -> None:
    with pytest.raises(BadInput, match=next(iter(given))) as told:
        TrainingArguments("out", **given)
    assert repr(near) in told.value.fix
    assert repr(near) in told.value.why


def test_an_enum_refuses_an_unknown_word_with_a_value_error() -> None:
    with pytest.raises(ValueError, match="Unknown SchedulerType 'cosin'"):
        SchedulerType("cosin")


def test_text_becomes_what_a_field_holds() -> None:
    args = TrainingArguments(
        Path("out"),  # type: ignore[arg-type]
        learning_rate="1e-4",  # type: ignore[arg-type]
        max_steps="1e3",  # type: ignore[arg-type]
        bf16="true",  # type: ignore[arg-type]
        eval_strategy=False,  # type: ignore[arg-type]  # YAML's reading of a bare `no`
        precision=None,
        run_name=2024,  # type: ignore[arg-type]
        lr_scheduler_kwargs='{"power": "2.0"}',
        label_names="labels start_positions",  # type: ignore[arg-type]
        resume_from_checkpoint="true",
    )
    assert args.output_dir == "out"
    assert (args.learning_rate, args.max_steps, args.bf16) == (1e-4, 1000, True)
    assert args.eval_strategy is IntervalStrategy.NO
    assert args.run_name == "2024"
    assert args.lr_scheduler_kwargs == {"power": 2.0}
    assert args.label_names == ["labels", "start_positions"]
    assert args.resume_from_checkpoint is True


def test_what_follows_from_other_arguments_is_filled_in() -> None:
    args = TrainingArguments(eval_strategy="steps", logging_steps=50.0, load_best_model_at_end=True)
    assert args.output_dir == "trainer_output"
    assert args.do_eval
    assert args.eval_steps == 50
    assert isinstance(args.logging_steps, int)
    assert args.metric_for_best_model == "loss"
    assert args.greater_is_better is False
    assert TrainingArguments("o", metric_for_best_model="f1").greater_is_better is True
    assert args.report_to == []
    assert args.debug == []
    assert args.disable_tqdm is False


def test_tokens_seen_may_be_yes_or_no() -> None:
    assert (
        TrainingArguments("o", include_num_input_tokens_seen=True).to_dict()[
            "include_num_input_tokens_seen"
        ]
        == "all"
    )
    args = TrainingArguments("o", include_num_input_tokens_seen=False)
    assert args.include_num_input_tokens_seen == "no"


def test_naming_a_compiler_or_its_mode_compiles() -> None:
    assert TrainingArguments("o", torch_compile_backend="eager").torch_compile
    args = TrainingArguments("o", torch_compile_mode="reduce-overhead")
    assert args.torch_compile
    assert args.torch_compile_backend == "inductor"


def test_an_output_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("here")
    for folder in (file, file / "below" / "it"):
        with pytest.raises(BadInput, match="output_dir") as told:
            TrainingArguments(str(folder))
        assert "not a folder" in told.value.why


def test_an_output_dir_is_not_made_by_looking_at_it(tmp_path: Path) -> None:
    TrainingArguments(str(tmp_path / "a" / "b"))
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_dir_in_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="output_dir"):
        TrainingArguments(str(tmp_path / "run"))


def test_an_impossible_folder_name_is_refused() -> None:
    with pytest.raises(BadInput, match="output_dir"):
        TrainingArguments("a\0b")
    with pytest.raises(BadInput, match="output_dir"):
        TrainingArguments("/" + "x" * 5000)


def test_a_setter_checks_its_values_at_once_and_agreement_later() -> None:
    args = TrainingArguments(
        "out", eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True
    )
    args.set_evaluate("steps", steps=10)  # saves still come by epoch
    with pytest.raises(BadInput, match="best model"):
        args.check()
    args.set_save("steps", steps=20).check()
    with pytest.raises(BadInput, match="learning_rate"):
        args.set_training(learning_rate=-1)
    with pytest.raises(BadInput, match="steps=0"):
        args.set_logging(steps=0)


def test_the_setters_set_what_they_say() -> None:
    args = TrainingArguments("out")
    args.set_training(batch_size=4, num_epochs=1).set_testing(batch_size=2)
    args.set_optimizer("sgd", learning_rate=0.1).set_lr_scheduler("cosine", warmup_steps=0.05)
    args.set_dataloader(train_batch_size=3, num_workers=2, sampler_seed=7)
    args.set_push_to_hub("me/model", token="secret").set_logging(report_to=["csv"])
    assert args.do_train
    assert args.do_predict
    assert args.per_device_train_batch_size == 3
    assert (args.optim, args.learning_rate, args.lr_scheduler_type) == ("sgd", 0.1, "cosine")
    assert (args.data_seed, args.hub_model_id, args.report_to) == (7, "me/model", ["csv"])
    args.check()


def test_the_numbers_of_generation_are_converted_and_checked() -> None:
    args = Seq2SeqTrainingArguments("out", generation_max_length="20")  # type: ignore[arg-type]
    assert args.generation_max_length == 20
    with pytest.raises(BadInput, match="generation_num_beams"):
        Seq2SeqTrainingArguments("out", generation_num_beams=0)
    with pytest.raises(BadType, match="predict_with_generate"):
        Seq2SeqTrainingArguments("out", predict_with_generate="perhaps")  # type: ignore[arg-type]
