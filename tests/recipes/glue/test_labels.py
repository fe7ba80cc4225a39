"""Which columns hold texts and labels, and which number a label gets."""

from __future__ import annotations

from typing import Any

import pytest

from anytrain.core.errors import BadInput
from anytrain.recipes.glue.tasks import (
    TASKS,
    Columns,
    Labels,
    TextTable,
    adopt,
    columns_of,
    find_labels,
)


def _table(**columns: Any) -> TextTable:
    return TextTable(columns, "train.csv")


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_file_with_the_usual_columns_fits_its_task(task: Any) -> None:
    labels = ["1", "0"] if task.labels else ["4.5", "0"]
    texts = {name: ["a", "b"] for name in task.columns[:-1]}
    table = _table(**texts, label=labels)
    found = columns_of(table, task)
    assert (found.first, *filter(None, [found.second]), found.label) == task.columns
    numbers = find_labels(table, task).numbers(labels, "train.csv")
    assert numbers == ([1, 0] if task.labels else [4.5, 0.0])


HEADERS = {
    "mrpc": "Quality,#1 ID,#2 ID,#1 String,#2 String",
    "stsb": "index,genre,filename,year,old_index,source1,source2,sentence1,sentence2,score",
    "qqp": "id,qid1,qid2,question1,question2,is_duplicate",
    "mnli": "index,promptID,pairID,genre,sentence1_binary_parse,sentence2_binary_parse,"
    "sentence1_parse,sentence2_parse,sentence1,sentence2,label1,gold_label",
    "qnli": "index,question,sentence,label",
    "rte": "index,sentence1,sentence2,label",
}


@pytest.mark.parametrize("name", HEADERS)
def test_the_header_of_a_tasks_own_download_is_known(name: str) -> None:
    header = HEADERS[name].split(",")
    found = columns_of(TextTable({column: ["x"] for column in header}, "train.tsv"), TASKS[name])
    assert {found.first, found.second, found.label} <= set(header)
    assert found.label == header[0 if name == "mrpc" else -1]


def test_labels_may_be_written_as_words_or_as_numbers() -> None:
    labels = find_labels(_table(sentence1=["a"], sentence2=["b"], label=["x"]), TASKS["rte"])
    written = ["entailment", "1", 0, "NOT_ENTAILMENT"]
    assert labels.numbers(written, "x.tsv") == [0, 1, 0, 1]


def test_texts_beside_the_label_are_read_in_the_order_of_the_file() -> None:
    assert columns_of(_table(label=[1], text=["a"]), None) == Columns("text", None, "label")
    assert columns_of(_table(q=["a"], a=["b"], label=[1], c=["d"]), None).second == "a"
    assert columns_of(_table(id=[7], text=["a"], label=[1]), None) == Columns("text", None, "label")
    assert columns_of(_table(idx=["a"]), None).first == "idx"
    pair = columns_of(_table(id=["a"], sentence2=["b"], sentence1=["c"]), None)
    assert pair == Columns("sentence1", "sentence2", None)


KINDS: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "words": (["pos", "neg", "pos"], ("neg", "pos")),
    "whole numbers in a csv": (["10", "9", "2"], ("2", "9", "10")),
    "whole numbers": ([1, 0, 1], ("0", "1")),
    "numbers with a point": ([0.5, 1, 2], ()),
    "numbers with a point in a csv": (["0.5", "1", "2"], ()),
    "numbers and words": (["1", "two"], ("1", "two")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_learnt_follows_from_how_the_labels_are_written(kind: str) -> None:
    values, names = KINDS[kind]
    assert find_labels(_table(text=["a"] * len(values), label=values), None).names == names


def test_names_that_a_data_set_gives_to_its_numbers_are_kept() -> None:
    table = TextTable({"text": ["a", "b"], "label": [1, 0]}, "set", label_names=("bad", "good"))
    labels = find_labels(table, None)
    assert labels.names == ("bad", "good")
    assert labels.numbers([1, 0], "set") == [1, 0]


def test_a_model_that_knows_these_labels_keeps_its_numbers() -> None:
    rte = Labels(TASKS["rte"].labels, TASKS["rte"].labels)
    theirs = adopt(rte, {"not_entailment": 0, "ENTAILMENT": 1}, trained=True)
    assert theirs is not None
    assert theirs.names == ("not_entailment", "ENTAILMENT")
    # The data's 0 is still entailment, which this model counts as 1.
    assert theirs.numbers(["0", "1", "entailment"], "x") == [1, 0, 1]


def test_a_model_with_other_labels_does_not_fit() -> None:
    ours = Labels(("a", "b"))
    assert adopt(ours, {"x": 0, "y": 1}, trained=True) is None
    assert adopt(ours, {"a": 0, "b": 1, "c": 2}, trained=True) is None
    more = adopt(ours, {"c": 0, "b": 1, "a": 2}, trained=False)
    assert more is not None
    assert more.names == ("c", "b", "a")
    assert adopt(ours, {"a": 0, "b": 5}, trained=True) is None
    assert adopt(ours, None, trained=True) is ours


WRONG: dict[str, tuple[dict[str, list[Any]], str | None, str]] = {
    "no label column": ({"text": ["a"]}, None, "no column 'label'"),
    "no text column": ({"label": [1]}, None, "no text"),
    "a task's column": ({"sentence1": ["a"], "label": [1]}, "mrpc", "no column 'sentence2'"),
    "one label": ({"text": ["a", "b"], "label": [1, 1]}, None, "Every row"),
    "an empty label": ({"text": ["a", "b"], "label": ["x", ""]}, None, "Row 2 .* has no label"),
}


@pytest.mark.parametrize("what", WRONG)
def test_data_that_cannot_be_learnt_from_says_why(what: str) -> None:
    columns, task, why = WRONG[what]
    with pytest.raises(BadInput, match=why):
        find_labels(TextTable(columns, "x"), TASKS[task] if task else None)


def test_a_label_outside_the_training_data_names_its_row() -> None:
    with pytest.raises(BadInput, match=r"label 'c' of dev.csv, row 2"):
        Labels(("a", "b")).numbers(["a", "c"], "dev.csv")
    with pytest.raises(BadInput, match=r"label 'nan' of dev.csv, row 1"):
        Labels(()).numbers(["nan"], "dev.csv")
