"""Any dataclass is filled from a command line, a dict, JSON or YAML."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, List, Literal, Optional, Union  # noqa: UP035 -- as scripts spell them

import pytest
import transformers

from anytrain.core.errors import BadInput, BadType, Notice
from anytrain.doors.training_args import (
    HfArg,
    HfArgumentParser,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

PARSERS = [HfArgumentParser, transformers.HfArgumentParser]
GUIDE = [
    "--model_name_or_path",
    "google-bert/bert-base-cased",
    "--task_name",
    "mrpc",
    "--do_train",
    "--do_eval",
    "--max_seq_length",
    "128",
    "--per_device_train_batch_size",
    "32",
    "--learning_rate",
    "2e-5",
    "--num_train_epochs",
    "3",
    "--output_dir",
    "runs/mrpc",
    "--overwrite_output_dir",
    "--use_mps_device",
]


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Model:
    model_name_or_path: str = field(metadata={"help": "The model."})
    revision: str = "main"
    use_fast: bool = field(default=True, metadata={"help": "Fast."})
    trust: bool = False
    token: Optional[str] = None  # noqa: UP045


@dataclass
class Data:
    task_name: Optional[str] = None  # noqa: UP045
    max_seq_length: int = 128
    max_train_samples: Optional[int] = None  # noqa: UP045
    share: float = 0.5
    columns: Optional[List[str]] = None  # noqa: UP006, UP045
    sizes: List[int] = field(default_factory=lambda: [1, 2])  # noqa: UP006
    color: Color = "red"  # type: ignore[assignment]
    mode: Literal["fast", "slow", 3] = "fast"
    shuffle: Optional[bool] = None  # noqa: UP045
    folder: Path = Path("here")
    options: dict[str, Any] = field(default_factory=dict)
    either: Union[int, str] = 1  # noqa: UP007
    short: int = HfArg(default=1, aliases=["-s", "--brief"], help="Short.")


@pytest.mark.parametrize("parser", PARSERS)
def test_the_guides_command_is_parsed_by_either_parser(parser: Any) -> None:
    with pytest.warns(Notice, match="use_mps_device=True changes nothing"):
        model, data, args = parser((Model, Data, TrainingArguments)).parse_args_into_dataclasses(
            GUIDE
        )
    assert model.model_name_or_path == "google-bert/bert-base-cased"
    assert (data.task_name, data.max_seq_length) == ("mrpc", 128)
    assert (args.do_train, args.do_eval, args.overwrite_output_dir) == (True, True, True)
    assert (args.learning_rate, args.num_train_epochs) == (2e-5, 3.0)
    assert (args.per_device_train_batch_size, args.output_dir) == (32, "runs/mrpc")


COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("--bf16", {"bf16": True}),
    ("--bf16 true --tf32 false", {"bf16": True, "tf32": False}),
    ("--no_remove_unused_columns", {"remove_unused_columns": False}),
    ("--remove_unused_columns False", {"remove_unused_columns": False}),
    ("--no-dataloader-pin-memory", {"dataloader_pin_memory": False}),
    ("--report_to wandb", {"report_to": ["wandb"]}),
    ("--report_to csv jsonl", {"report_to": ["csv", "jsonl"]}),
    ("--report_to none", {"report_to": []}),
    ("--label_names a b", {"label_names": ["a", "b"]}),
    ("--include_for_metrics inputs loss", {"include_for_metrics": ["inputs", "loss"]}),
    ("--lr_scheduler_type cosine", {"lr_scheduler_type": "cosine"}),
    ("--lr_scheduler_kwargs {\"power\":2}", {"lr_scheduler_kwargs": {"power": 2}}),
    ("--eval-strategy epoch", {"eval_strategy": "epoch", "do_eval": True}),
    ("--logging_steps 0.1", {"logging_steps": 0.1}),
    ("--logging_steps 10", {"logging_steps": 10}),
    ("--debug underflow_overflow", {"debug": ["underflow_overflow"]}),
    ("--include_num_input_tokens_seen", {"include_num_input_tokens_seen": "all"}),
    ("--include_num_input_tokens_seen non_padding",
     {"include_num_input_tokens_seen": "non_padding"}),
    ("--resume_from_checkpoint runs/a", {"resume_from_checkpoint": "runs/a"}),
    ("--resume_from_checkpoint true", {"resume_from_checkpoint": True}),
    ("--disable_tqdm", {"disable_tqdm": True}),
    ("--disable_tqdm true", {"disable_tqdm": True}),
    ("--hub_private_repo --ddp_find_unused_parameters false",
     {"hub_private_repo": True, "ddp_find_unused_parameters": False}),
    ("--save_safetensors --no_cuda false --fp16_backend auto", {}),
    ("--precision auto --on_nonfinite skip --no_async_save",
     {"precision": "auto", "on_nonfinite": "skip", "async_save": False}),
    ("--log_level info --seed 7", {"log_level": "info", "seed": 7}),
    ("--accelerator_config {\"even_batches\":false}", {}),
    ("", {}),
]  # fmt: skip


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=[c for c, _ in COMMANDS])
def test_both_parsers_read_a_command_alike(
    parser: Any, command: str, expected: dict[str, Any]
) -> None:
    words = ["--output_dir", "out", *command.split()]
    (args,) = parser(TrainingArguments).parse_args_into_dataclasses(words)
    reference = TrainingArguments("out", **{k: v for k, v in expected.items() if k != "do_eval"})
    config = args.accelerator_config
    assert {name: getattr(args, name) for name in expected} == expected
    args.accelerator_config = reference.accelerator_config
    assert args == reference
    assert config.even_batches == ("even_batches" not in command)


@pytest.mark.parametrize("parser", PARSERS)
def test_both_parsers_fill_the_seq2seq_arguments(parser: Any) -> None:
    words = ["--output_dir", "out", "--predict_with_generate", "--generation_num_beams", "4"]
    (args,) = parser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(words)
    assert args.predict_with_generate
    assert args.generation_num_beams == 4


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("", {"max_train_samples": None, "sizes": [1, 2], "color": "red", "mode": "fast"}),
        ("--max_train_samples 10 --share 1e-1", {"max_train_samples": 10, "share": 0.1}),
        ("--columns a b --sizes 3 4 5", {"columns": ["a", "b"], "sizes": [3, 4, 5]}),
        ("--color blue --mode 3", {"color": "blue", "mode": 3}),
        ("--shuffle false", {"shuffle": False}),
        ("--folder there", {"folder": Path("there")}),
        ("--brief 3", {"short": 3}),
        ("-s 3", {"short": 3}),
    ],
)
def test_a_users_dataclass_is_filled_as_transformers_does(
    command: str, expected: dict[str, Any]
) -> None:
    ours, theirs = (p(Data).parse_args_into_dataclasses(command.split())[0] for p in PARSERS)
    assert ours == theirs
    assert {name: getattr(ours, name) for name in expected} == expected


def test_more_than_transformers_reads_is_read_too() -> None:
    words = ["--shuffle", "--options", '{"a": 1}', "--either", "many"]
    (data,) = HfArgumentParser(Data).parse_args_into_dataclasses(words)
    assert (data.shuffle, data.options, data.either) == (True, {"a": 1}, "many")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--color", "blu"], "did you mean 'blue'"),
        (["--max_seq_length", "long"], "'long': expected a whole number"),
        (["--shuffle", "perhaps"], "expected true or false"),
        (["--lr_scheduler_type", "cosin"], "did you mean 'cosine'"),
        (["--log_level", "inf"], "did you mean 'info'"),
        (
            ["--optim", "adamw_torh"],
            "expected one of adamw_torch, adamw_torch_fused, adafactor, sgd, adagrad, rmsprop; did",
        ),
        ([], "--model_name_or_path"),
    ],
)
def test_a_wrong_command_ends_with_one_line_that_helps(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model_name_or_path", "m"] if words else []
    with pytest.raises(SystemExit) as ended:
        HfArgumentParser((Model, Data, TrainingArguments)).parse_args_into_dataclasses(
            [*model, *words]
        )
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert told in said
    assert len(said.splitlines()) == 2


def test_an_unknown_argument_is_refused_with_the_nearest_name() -> None:
    parser = HfArgumentParser((Data, TrainingArguments))
    with pytest.raises(BadInput, match="--learnin_rate") as told:
        parser.parse_args_into_dataclasses(["--learnin_rate", "1"])
    assert "--learning_rate" in told.value.fix
    *_, remaining = parser.parse_args_into_dataclasses(
        ["--learnin_rate", "1"], return_remaining_strings=True
    )
    assert remaining == ["--learnin_rate", "1"]


def test_arguments_added_by_hand_come_back_as_a_namespace() -> None:
    parser = HfArgumentParser(Data)
    parser.add_argument("--extra", type=int, default=0)
    data, rest = parser.parse_args_into_dataclasses(["--extra", "3"])
    assert data == Data()
    assert rest.extra == 3


def test_help_names_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        HfArgumentParser((Data, TrainingArguments)).parse_args_into_dataclasses(["--help"])
    assert ended.value.code == 0
    assert "--use_mps_device" in capsys.readouterr().out


FILE = {"output_dir": "out", "learning_rate": 1e-4, "eval_strategy": "no", "share": 0.25}


@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_a_file_fills_the_dataclasses(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"args.{kind}"
    # In YAML 1e-4 is text, and a bare `no` is False.
    yaml = "output_dir: out\nlearning_rate: 1e-4\neval_strategy: no\nshare: 25e-2\nprecision: no\n"
    file.write_text(json.dumps({**FILE, "precision": "no"}) if kind == "json" else yaml)
    parser = HfArgumentParser((Data, TrainingArguments))
    data, args = getattr(parser, f"parse_{kind}_file")(file)
    assert data.share == 0.25
    assert (args.learning_rate, args.eval_strategy, args.precision) == (1e-4, "no", "no")


def test_an_old_name_means_the_same_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("output_dir: out\nuse_mps_device: true\nwarmup_ratio: 0.1\n")
    with pytest.warns(Notice, match="use_mps_device"), pytest.warns(Notice, match="warmup_ratio"):
        (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(file)
    assert args.warmup_steps == 0.1


def test_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    parser = HfArgumentParser((Data, TrainingArguments))
    with pytest.raises(BadInput, match="learnin_rate") as told:
        parser.parse_dict({"learnin_rate": 1})
    assert "did you mean learning_rate?" in told.value.fix
    data, _ = parser.parse_dict({"learnin_rate": 1}, allow_extra_keys=True)
    assert data == Data()


@pytest.mark.parametrize("text", ["[1, 2]", "{not: [whole", ""])
def test_a_file_that_holds_no_arguments_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"args\.yaml"):
        HfArgumentParser(Data).parse_yaml_file(file)


def test_the_command_line_beats_files_of_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.with_suffix(".args").write_text("--share 0.1 --max_seq_length 1")
    more = tmp_path / "more.args"
    more.write_text("--max_seq_length 2")
    monkeypatch.setattr(sys, "argv", [str(script), "--share", "0.2", "--args_file", str(more)])
    parser = HfArgumentParser(Data)
    (data,) = parser.parse_args_into_dataclasses(args_file_flag="--args_file")
    assert (data.share, data.max_seq_length) == (0.2, 2)
    (data,) = parser.parse_args_into_dataclasses(["--share", "0.3"], look_for_args_file=False)
    assert (data.share, data.max_seq_length) == (0.3, 128)


@dataclass
class Start:
    name: str
    rate: float = 0.1


@pytest.mark.parametrize("kind", ["json", "yaml", "yml"])
def test_the_command_line_wins_over_a_file_that_comes_first(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"run.{kind}"
    file.write_text('{"name": "bert", "learning_rate": 1e-4, "seed": 7, "extra": 3}')
    parser = HfArgumentParser((Start, TrainingArguments))
    parser.add_argument("--extra", type=int, required=True)
    words = [str(file), "--learning_rate", "1e-3", "--output_dir", str(tmp_path)]
    model, args, rest = parser.parse_args_into_dataclasses(words)
    assert (model, args.learning_rate, args.seed, rest.extra) == (Start("bert"), 1e-3, 7, 3)
    assert args.is_told("seed")
    assert args.is_told("learning_rate")
    assert not args.is_told("bf16")
    with pytest.raises(SystemExit):  # what the file does not hold is still asked for
        parser.parse_args_into_dataclasses(["--learning_rate", "1e-3"])


def test_a_named_file_wins_over_the_script_s_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.args").write_text("--share 0.1 --max_seq_length 1")
    (tmp_path / "run.json").write_text('{"share": 0.2}')
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py"), str(tmp_path / "run.json")])
    (data,) = HfArgumentParser(Data).parse_args_into_dataclasses()
    assert (data.share, data.max_seq_length) == (0.2, 1)


def test_a_file_s_wrong_name_or_place_is_told(tmp_path: Path) -> None:
    parser = HfArgumentParser(Data)
    file = tmp_path / "run.yaml"
    with pytest.raises(BadInput, match="no such file"):
        parser.parse_args_into_dataclasses([str(file)])
    file.write_text("shar: 0.2\n")
    with pytest.raises(BadInput, match="shar") as told:
        parser.parse_args_into_dataclasses([str(file), "--share", "1"])
    assert "did you mean share?" in told.value.fix
    with pytest.raises(BadInput, match="comes first"):
        parser.parse_args_into_dataclasses(["--share", "1", str(file)])


def test_a_word_that_may_be_the_caller_s_own_is_no_file_of_arguments(tmp_path: Path) -> None:
    *_, remaining = HfArgumentParser(Data).parse_args_into_dataclasses(
        ["rows.json"], return_remaining_strings=True
    )
    assert remaining == ["rows.json"]
    parser = HfArgumentParser(Data)
    parser.add_argument("rows")
    *_, rest = parser.parse_args_into_dataclasses(["rows.json"])
    assert rest.rows == "rows.json"


def test_a_dataclass_whose_types_cannot_be_read_is_refused_by_name() -> None:
    @dataclass
    class Local:
        value: Unknown = None  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(BadType, match="Local"):
        HfArgumentParser(Local)


@dataclass
class WithOwnDict(TrainingArguments):
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]
    model_init_kwargs: Optional[Union[dict, str]] = field(default=None)  # noqa: UP007,UP045


def test_a_subclass_s_own_settings_may_come_as_json() -> None:
    assert WithOwnDict("out", model_init_kwargs='{"a": 1}').model_init_kwargs == {"a": 1}
    assert WithOwnDict("out", model_init_kwargs={"a": 1}).model_init_kwargs == {"a": 1}
    assert WithOwnDict("out").model_init_kwargs is None
    (told,) = HfArgumentParser(WithOwnDict).parse_args_into_dataclasses(
        ["--output_dir", "out", "--model_init_kwargs", '{"a": 1}']
    )
    assert told.model_init_kwargs == {"a": 1}
