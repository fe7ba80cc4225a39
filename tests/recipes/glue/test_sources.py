"""Rows from files, from a data set's folder, and the words where neither is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anytrain.core.errors import BadInput
from anytrain.recipes.glue import sources
from anytrain.recipes.glue.arguments import GlueJob, parse
from anytrain.recipes.glue.job import check
from launching import run_command
from tiny_bert import pairs, write_rows


def _job(tmp_path: Path, *words: object) -> GlueJob:
    words = ("--model_name_or_path", "bert", "--output_dir", tmp_path / "out", *words)
    return parse([str(word) for word in words])


def test_files_are_used_with_the_columns_and_sets_of_a_task(tmp_path: Path) -> None:
    rows = [{"premise": "a", "hypothesis": "b", "label": 2}] * 3
    names = ("train", "validation", "test", "validation_mismatched", "test_mismatched")
    given = [(f"--{name}_file", write_rows(tmp_path / f"{name}.tsv", rows)) for name in names]
    work = ("--do_train", "--do_eval", "--do_predict")
    job = _job(tmp_path, "--task_name", "MNLI", *sum(given, ()), *work)
    data = sources.load(job)
    assert data.train is not None
    assert [name for name, _ in data.evaluated] == ["mnli", "mnli-mm"]
    assert [table.origin for _, table in data.predicted] == [
        str(tmp_path / "test.tsv"),
        str(tmp_path / "test_mismatched.tsv"),
    ]


def test_pairs_to_learn_from_and_single_texts_to_evaluate_are_refused(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.csv", pairs(4))
    dev = write_rows(tmp_path / "dev.csv", [{"sentence": "a", "label": 1}] * 2)
    words = ("--train_file", train, "--validation_file", dev, "--do_train", "--do_eval")
    with pytest.raises(BadInput, match=r"sentence1 and sentence2 in one, and sentence in"):
        check(_job(tmp_path, *words))


def test_a_folder_of_csv_files_is_a_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "validation"):
        write_rows(folder / f"{split}.csv", pairs(4))
    words = ("--dataset_name", folder, "--do_train", "--do_eval", "--cache_dir", tmp_path / "c")
    data = sources.load(_job(tmp_path, *words))
    assert data.train is not None
    assert list(data.train.columns) == ["sentence1", "sentence2", "label"]
    assert data.train.columns["label"] == [0, 1, 0, 1]
    with pytest.raises(BadInput, match="no split 'test'"):
        sources.load(_job(tmp_path, *words, "--do_predict"))


def test_a_data_set_saved_to_disk_brings_the_names_of_its_labels(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["bad", "good"])
    )
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)
    datasets.DatasetDict(train=rows).save_to_disk(str(tmp_path / "set"))
    data = sources.load(_job(tmp_path, "--dataset_name", tmp_path / "set", "--do_train"))
    assert data.train is not None
    assert data.train.label_names == ("bad", "good")


def test_without_a_network_it_is_said_which_files_to_give(tmp_path: Path) -> None:
    words = f"--model_name_or_path bert --do_train --task_name mrpc --output_dir {tmp_path}/out"
    told = run_command(
        [sys.executable, "-m", "anytrain", "glue", *words.split()],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        check=False,
    )
    assert told.returncode == 2
    assert "Cannot load the data set nyu-mll/glue/mrpc" in told.stderr
    assert "pass --train_file and --validation_file" in told.stderr
    assert "columns sentence1, sentence2, label" in told.stderr
    assert "Traceback" not in told.stderr
