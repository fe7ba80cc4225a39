"""Every field, property and method of transformers' own TrainingArguments is here."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import training_args as theirs

import anytrain
from anytrain.doors.training_args import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from anytrain.doors.training_args.legacy import RULES, OldFields
from anytrain.doors.training_args.support import DIFFERENCES, RUNNING, table
from anytrain.engine.optim import build
from launching import run_script

# 2026-11: what is asked for happens in any case, so that nobody has to read the wish.
ALWAYS_SO = (
    "average_tokens_across_devices",
    "enable_jit_checkpoint",
    "eval_accumulation_steps",
    "eval_use_gather_object",
    "logging_nan_inf_filter",
)
OLD_OPTIMIZERS = {"adamw_hf", "adamw_apex_fused"}  # 2026-11: names of 4.x, taken for torch's


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def test_every_field_of_transformers_is_here_with_its_default() -> None:
    ours = {f.name: _default(f) for f in fields(TrainingArguments)}
    for field in fields(transformers.TrainingArguments):
        assert field.name in ours
        if field.name not in DIFFERENCES:
            assert ours[field.name] == _default(field), field.name


def test_a_listed_difference_is_one() -> None:
    ours = {f.name: _default(f) for f in fields(TrainingArguments)}
    others = {f.name: _default(f) for f in fields(transformers.TrainingArguments)}
    assert all(ours[name] != others[name] for name in DIFFERENCES)


def test_the_fields_come_in_the_order_of_transformers() -> None:
    others = [f.name for f in fields(transformers.TrainingArguments)]
    ours = [f.name for f in fields(TrainingArguments) if f.name in others]
    assert ours == others


def test_the_seq2seq_fields_are_here_with_their_defaults() -> None:
    ours = {f.name: _default(f) for f in fields(Seq2SeqTrainingArguments)}
    for field in fields(transformers.Seq2SeqTrainingArguments):
        if field.name not in DIFFERENCES:
            assert ours[field.name] == _default(field), field.name


def test_every_public_property_and_method_of_transformers_is_here() -> None:
    names = [name for name in vars(transformers.TrainingArguments) if name[0] != "_"]
    missing = [name for name in names if not hasattr(TrainingArguments, name)]
    # Leftovers of how that class is written.
    assert set(missing) == {"default_optim", "is_torch_greater_or_equal_than_2_8"}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, value in vars(transformers.TrainingArguments).items()
        if inspect.isfunction(value) and name[0] != "_"
    ],
)
def test_a_method_takes_what_that_of_transformers_takes(name: str) -> None:
    theirs_ = inspect.signature(getattr(transformers.TrainingArguments, name)).parameters
    ours = inspect.signature(getattr(TrainingArguments, name)).parameters
    for parameter in theirs_.values():
        assert parameter.name in ours
        assert ours[parameter.name].default == parameter.default


@pytest.mark.parametrize(
    "ours", [HubStrategy, IntervalStrategy, ParallelMode, SaveStrategy, SchedulerType]
)
def test_an_enum_holds_the_words_of_transformers(ours: Any) -> None:
    home = theirs if hasattr(theirs, ours.__name__) else transformers.trainer_utils
    there = getattr(home, ours.__name__)
    assert {m.name: m.value for m in ours} == {m.name: m.value for m in there}


def test_the_optimizers_are_those_of_transformers_and_old_names() -> None:
    there = {m.name: m.value for m in theirs.OptimizerNames}
    ours = {m.name: m.value for m in OptimizerNames}
    assert {n: v for n, v in ours.items() if v not in OLD_OPTIMIZERS} == there


def test_the_optimizers_that_run_are_those_that_can_be_built() -> None:
    assert set(RUNNING) == set(build.names())


def test_every_field_has_an_answer_and_every_old_name_a_rule() -> None:
    names = [f.name for f in fields(TrainingArguments)]
    assert list(table()) == names
    kept = {"overwrite_output_dir", "logging_dir"}
    assert {f.name for f in fields(OldFields)} - kept == set(RULES)


def test_an_argument_that_works_is_read_by_somebody() -> None:
    source = Path(anytrain.__file__).parent
    rooms = source / "doors" / "training_args"
    readers = [p for p in source.rglob("*.py") if not {"training_args", "compat"} & {*p.parts}]
    readers += [rooms / "session.py", rooms / "processes.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in readers)
    works = [name for name, support in table().items() if support.kind == "works"]
    unread = [name for name in works if not re.search(rf"\b{name}\b", text)]
    assert set(unread) <= set(ALWAYS_SO)


def test_making_arguments_loads_no_torch() -> None:
    told = run_script(
        """
        import sys
        from anytrain.doors.training_args import HfArgumentParser, TrainingArguments
        words = ["--output_dir", "out", "--bf16", "--report_to", "tensorboard"]
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
        args.to_dict(), str(args), args.world_size, args.should_save
        with args.main_process_first():
            pass
        print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
        """
    )
    assert told.stdout.strip() == "[]"
