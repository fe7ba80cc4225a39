"""The options: run_glue's by name, and refused before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from anytrain.core.errors import AnytrainError, BadInput, Notice
from anytrain.recipes.glue import command
from anytrain.recipes.glue.arguments import GlueJob, parse

MODEL = ["--model_name_or_path", "bert"]
FILES = ["--train_file", "a.tsv", "--validation_file", "b.tsv"]
GUIDE = (
    "--model_name_or_path google-bert/bert-base-cased --task_name mrpc --do_train --do_eval "
    "--max_seq_length 128 --per_device_train_batch_size 32 --learning_rate 2e-5 "
    "--num_train_epochs 3 --output_dir {out} --overwrite_output_dir"
)


def _parse(tmp_path: Path, *words: str) -> GlueJob:
    return parse([*words, "--output_dir", str(tmp_path / "out")])


def test_the_guides_command_is_read_whole(tmp_path: Path) -> None:
    job = parse(GUIDE.format(out=tmp_path).split())
    assert job.model.model_name_or_path == "google-bert/bert-base-cased"
    assert job.data.task_name == "mrpc"
    assert job.data.max_seq_length == 128
    assert job.training.per_device_train_batch_size == 32
    assert job.training.learning_rate == 2e-5
    assert job.training.overwrite_output_dir is True
    assert job.training.precision == "auto"


def test_the_guides_flag_for_mps_is_answered_with_one_line(tmp_path: Path) -> None:
    with pytest.warns(Notice, match="no longer needed"):
        parse([*GUIDE.format(out=tmp_path).split(), "--use_mps_device"])


@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_a_single_file_holds_the_options(tmp_path: Path, kind: str) -> None:
    told = {
        "model_name_or_path": "bert",
        "task_name": "rte",
        "do_train": True,
        "learning_rate": 1e-4,
        "output_dir": str(tmp_path / "out"),
    }
    path = tmp_path / f"options.{kind}"
    path.write_text(json.dumps(told) if kind == "json" else yaml.safe_dump(told))
    job = parse([str(path)])
    assert (job.data.task_name, job.training.learning_rate) == ("rte", 1e-4)


def test_a_file_comes_first_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: bert\ntask_name: rte\ndo_train: true\nseed: 3\n")
    job = parse([str(path), "--learning_rate", "1e-3", "--task_name", "cola"])
    assert (job.data.task_name, job.training.learning_rate) == ("cola", 1e-3)
    assert (job.training.seed, job.training.do_train) == (3, True)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--batch_size", "--per_device_train_batch_size"),
        ("--lr", "--learning_rate"),
        ("--epochs", "--num_train_epochs"),
        ("--max_length", "--max_seq_length"),
        ("--dataset", "--dataset_name"),
    ],
)
def test_the_argument_that_was_meant_is_named(given: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as told:
        _parse(tmp_path, *MODEL, "--task_name", "rte", given, "3")
    assert meant in str(told.value)


@pytest.mark.parametrize(
    "chosen", ["--bf16", "--fp16", "--precision no", "--bf16 False", "--fp16 false"]
)
def test_a_precision_that_was_chosen_is_kept(tmp_path: Path, chosen: str) -> None:
    job = _parse(tmp_path, *MODEL, "--task_name", "rte", "--do_train", *chosen.split())
    assert job.training.precision != "auto"


def test_what_the_command_chooses_itself_leaves_the_rest_ungiven(tmp_path: Path) -> None:
    job = _parse(tmp_path, *MODEL, "--task_name", "rte", "--do_train", "--seed", "7")
    assert (job.training.precision, job.training.length_buckets) == ("auto", "auto")
    assert job.training.is_told("seed")
    assert not job.training.is_told("dataloader_num_workers")


def test_a_launchers_precision_is_not_overruled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYTRAIN_LAUNCH_PRECISION", "no")
    job = _parse(tmp_path, *MODEL, "--task_name", "rte", "--do_train")
    assert job.training.precision is None


WRONG = {
    "--task_name mrpc --do_train": "No model was named",
    "--config_name bert --task_name mrpc --do_train": "No tokenizer was named",
    "--model_name_or_path ./nowhere --task_name mrpc --do_train": "Cannot find './nowhere'",
    "MODEL --do_train": "No data was named",
    "MODEL --task_name mprc --do_train": "Unknown task 'mprc'",
    "MODEL --task_name mrpc": "nothing to do",
    "MODEL --task_name mrpc --do_train --max_seq_length 1000000000": "--max_seq_length",
    "MODEL --task_name mrpc --do_train --max_seq_length 0": "--max_seq_length 0",
    "MODEL --task_name mrpc --do_train --max_seq_length -5": "--max_seq_length -5",
    "MODEL --task_name mrpc --do_train --max_seq_length 10**9": r"10\*\*9",
    "MODEL --task_name mrpc --do_train --max_train_samples 0": "--max_train_samples 0",
    "MODEL --task_name mrpc --do_train --learning_rate -1": "learning_rate",
    "MODEL --task_name mrpc --do_train --per_device_train_batch_size 0": "batch_size",
    "MODEL --task_name mrpc --do_train --lr_scheduler_type lineer": "linear",
    "MODEL --task_name mrpc --do_train --learning_rte 1": "learning_rate",
    "MODEL --task_name mrpc --do_train --bf16 --fp16": "fp16",
    "MODEL --task_name mrpc --do_train --config_overrides hidden_size": "config_overrides",
    "MODEL FILES --dataset_name x --do_train": "both --dataset_name and --train_file",
    "MODEL FILES --do_predict": "--test_file is missing",
    "MODEL --train_file a.tsv --do_train --do_eval": "--validation_file is missing",
    "MODEL --validation_file a.tsv --do_train": "--train_file is missing",
    "MODEL --train_file a.txt --do_train": "what kind of file 'a.txt'",
    "MODEL FILES --do_eval --validation_mismatched_file c.tsv": "MNLI alone",
}


@pytest.mark.parametrize("words", WRONG)
def test_options_that_cannot_work_are_refused(tmp_path: Path, words: str) -> None:
    spelt = words.replace("MODEL", " ".join(MODEL)).replace("FILES", " ".join(FILES))
    with pytest.raises((AnytrainError, SystemExit), match=WRONG[words]):
        _parse(tmp_path, *spelt.split())


def test_a_model_is_not_trained_over_itself(tmp_path: Path) -> None:
    start = tmp_path / "model"
    start.mkdir()
    words = ["--model_name_or_path", str(start), "--task_name", "rte", "--do_train"]
    with pytest.raises(BadInput, match="would replace the model"):
        parse([*words, "--output_dir", str(start), "--overwrite_output_dir"])


def test_refusing_options_loads_no_torch() -> None:
    program = (
        "import sys\n"
        "from anytrain.recipes.glue.arguments import parse\n"
        "try:\n"
        "    parse(['--model_name_or_path', 'x', '--task_name', 'nope', '--do_train'])\n"
        "except ValueError:\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout == "False False\n", told.stderr


def test_the_help_names_every_option_once() -> None:
    from dataclasses import fields

    from anytrain.doors.training_args import TrainingArguments
    from anytrain.recipes.glue.arguments import DataTrainingArguments, ModelArguments

    text = command.help_text("anytrain glue")
    for kind in (ModelArguments, DataTrainingArguments):
        for field in fields(kind):
            assert f"  --{field.name}" in text
    for field in fields(TrainingArguments):
        assert field.name in text
    assert max(map(len, text.splitlines())) <= 100
