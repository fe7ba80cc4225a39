"""What is said of a name that nobody knows: which one was meant."""

from __future__ import annotations

from typing import Any

import pytest

from anytrain import Accelerator, Trainer, TrainingArguments
from anytrain.core.errors import BadInput
from anytrain.core.nearest import nearest
from anytrain.core.plan import check_precision, check_strategy, wish
from anytrain.doors.training_args.fields import RUNNING
from anytrain.engine.optim import build
from anytrain.engine.recording import trackers
from anytrain.machine.backends.probe import parse_device
from anytrain.recipes.bench.comparison import choose
from anytrain.recipes.bench.settings import check_size


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        (TrainingArguments, "batch_size", "per_device_train_batch_size"),
        (TrainingArguments, "eval_batch_size", "per_device_eval_batch_size"),
        (TrainingArguments, "lr", "learning_rate"),
        (TrainingArguments, "epochs", "num_train_epochs"),
        (TrainingArguments, "num_epochs", "num_train_epochs"),
        (TrainingArguments, "evaluation_steps", "eval_steps"),
        (TrainingArguments, "optimizer", "optim"),
        (TrainingArguments, "learnin_rate", "learning_rate"),
        (Accelerator, "mixed_precison", "mixed_precision"),
        (Accelerator, "report_to", "log_with"),
        (Accelerator, "accumulation_steps", "gradient_accumulation_steps"),
        (Trainer, "dataset", "train_dataset"),
        (Trainer, "collate_fn", "data_collator"),
    ],
)
def test_an_unknown_argument_is_a_type_error_that_names_the_one_meant(
    kind: Any, given: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{given}'") as told:
        kind(**{given: 1})
    assert f"{given}: did you mean {meant}?" in str(told.value)


def test_an_old_name_is_taken_and_never_suggested() -> None:
    with pytest.raises(TypeError) as told:
        TrainingArguments(per_gpu_train_batch_siz=1)  # type: ignore[call-arg]
    assert "did you mean per_device_train_batch_size?" in str(told.value)


def test_a_subclass_with_arguments_of_its_own_keeps_them() -> None:
    class Mine(Accelerator):
        def __init__(self, depth: int, **others: Any) -> None:
            self.depth = depth
            super().__init__(**others)

    assert Mine(depth=3, cpu=True).depth == 3
    with pytest.raises(TypeError, match="dept"):
        Mine(dept=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value", "meant", "accepted"),
    [
        ("optim", "adam", "adamw_torch", RUNNING),
        ("optim", "sdg", "sgd", RUNNING),
        ("optim", "something", None, RUNNING),
        ("eval_strategy", "epochs", "epoch", ("no", "steps", "epoch")),
        ("save_strategy", "step", "steps", ("no", "steps", "epoch", "best")),
        ("logging_strategy", "never", "no", ("no", "steps", "epoch")),
        ("lr_scheduler_type", "linear_with_warmup", "linear", ("linear", "cosine")),
        ("precision", "bfloat16", "bf16", ("no", "bf16", "fp16", "auto")),
        ("report_to", "tensorbord", "tensorboard", ("tensorboard", "wandb", "jsonl")),
    ],
)
def test_an_unknown_word_is_refused_with_what_is_accepted(
    name: str, value: str, meant: str | None, accepted: tuple[str, ...]
) -> None:
    with pytest.raises(BadInput, match=value) as told:
        TrainingArguments("out", **{name: value})
    assert told.value.why.startswith("the known ones are ")
    assert all(repr(word) in told.value.why for word in accepted)
    assert told.value.fix == (f"did you mean {meant!r}?" if meant else "pass one of these.")
    if name == "optim":  # what other libraries have is refused by name, and not offered
        assert "bnb" not in told.value.why


@pytest.mark.parametrize(
    ("ask", "meant"),
    [
        (lambda: check_precision(wish("float16", "launch option")), "fp16"),
        (lambda: check_strategy(wish("smpd", "launch option")), "spmd"),
        (lambda: trackers.resolve("wanbd", "logs"), "wandb"),
        (lambda: check_size("minlm"), "minilm"),
        (lambda: choose("anytrin", even=False), "anytrain"),
        (
            lambda: build.optimizer_class(
                "adam", learning_rate=1, beta1=0, beta2=0, epsilon=0, options=None
            ),
            "adamw_torch",
        ),
    ],
)
def test_words_elsewhere_are_guessed_too(ask: Any, meant: str) -> None:
    with pytest.raises(BadInput) as told:
        ask()
    assert repr(meant) in told.value.fix


def test_the_first_spelling_of_an_option_is_the_one_that_is_named() -> None:
    options = ["num_processes", "num-processes"]
    assert nearest("num-process", options) == "num_processes"
    assert nearest("nproc_per_node", options) == "num_processes"
    assert nearest("xyzzy", options) is None


def test_a_device_is_guessed_too() -> None:
    with pytest.raises(BadInput, match="the known ones are tpu") as told:
        parse_device("cuad:0")
    assert told.value.fix == "did you mean 'cuda'?"
