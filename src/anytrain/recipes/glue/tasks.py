"""The nine GLUE tasks, and the texts and labels of a table.

A task knows its labels. Without one, whole numbers and texts are classes and numbers with a
point are a value to predict, whichever kind of file they come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anytrain.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a task's data: how run_glue names it, and how its data set does."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class GlueTask:
    """What a GLUE task is made of.

    Each of `first`, `second` and `label` holds the names a column may have, the usual one first;
    the others are those of the task's own download. No `labels` means a number to predict.
    """

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    label: tuple[str, ...] = ("label",)
    evaluated: tuple[Split, ...] = ()
    predicted: tuple[Split, ...] = ()
    bare_columns: tuple[str, ...] = ()
    """The columns of the download where it has no header line."""

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number."""
        return not self.labels

    @property
    def columns(self) -> tuple[str, ...]:
        """The usual names of the columns that a training file needs."""
        return (self.first[0], *self.second[:1], self.label[0])

    @property
    def eval_splits(self) -> tuple[Split, ...]:
        """The sets that are evaluated, in order."""
        return self.evaluated or (Split(self.name, "validation"),)

    @property
    def predict_splits(self) -> tuple[Split, ...]:
        """The sets that are predicted, in order."""
        return self.predicted or (Split(self.name, "test"),)


_SENTENCE, _PAIR = ("sentence",), (("sentence1",), ("sentence2",))
_ENTAILED = ("entailment", "not_entailment")
_DUPLICATES = ("not_duplicate", "duplicate")
_SCORES = ("accuracy", "f1")

TASKS = {
    task.name: task
    for task in (
        GlueTask(
            "cola",
            _SENTENCE,
            (),
            ("unacceptable", "acceptable"),
            ("matthews_correlation",),
            bare_columns=("source", "label", "star", "sentence"),
        ),
        GlueTask("sst2", _SENTENCE, (), ("negative", "positive"), ("accuracy",)),
        GlueTask(
            "mrpc",
            ("sentence1", "#1 String"),
            ("sentence2", "#2 String"),
            ("not_equivalent", "equivalent"),
            _SCORES,
            label=("label", "Quality"),
        ),
        GlueTask("stsb", *_PAIR, (), ("pearson", "spearmanr"), label=("label", "score")),
        GlueTask(
            "qqp",
            ("question1",),
            ("question2",),
            _DUPLICATES,
            _SCORES,
            label=("label", "is_duplicate"),
        ),
        GlueTask(
            "mnli",
            ("premise", "sentence1"),
            ("hypothesis", "sentence2"),
            ("entailment", "neutral", "contradiction"),
            ("accuracy",),
            label=("label", "gold_label"),
            evaluated=(
                Split("mnli", "validation_matched"),
                Split("mnli-mm", "validation_mismatched"),
            ),
            predicted=(Split("mnli", "test_matched"), Split("mnli-mm", "test_mismatched")),
        ),
        GlueTask("qnli", ("question",), ("sentence",), _ENTAILED, ("accuracy",)),
        GlueTask("rte", *_PAIR, _ENTAILED, ("accuracy",)),
        GlueTask("wnli", *_PAIR, ("not_entailment", "entailment"), ("accuracy",)),
    )
}


_NUMBERS_OF_ROWS = frozenset({"id", "idx", "index", "guid", "uid"})
"""Columns of these names tell rows apart, and are no texts."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Columns by name, and where they came from; rows keep the order of the file."""

    columns: Mapping[str, Sequence[Any]]
    origin: str
    label_names: tuple[str, ...] = ()
    """The names of whole-number labels, where the source tells them."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def first(self, count: int | None) -> TextTable:
        """Return the first `count` rows, or all where there are fewer or none is asked for."""
        if count is None or count >= len(self):
            return self
        kept = {name: column[:count] for name, column in self.columns.items()}
        return TextTable(kept, self.origin, self.label_names)


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a table hold the texts and the label."""

    first: str
    second: str | None
    label: str | None


@dataclass(frozen=True, slots=True)
class Labels:
    """The names of the classes in the order of their numbers; none: a value is predicted."""

    names: tuple[str, ...]
    meanings: tuple[str, ...] = ()
    """What whole numbers in the data stand for, where the source tells it."""

    @property
    def is_regression(self) -> bool:
        """Whether the label is a value, not a class."""
        return not self.names

    def numbers(self, values: Sequence[Any], origin: str) -> list[int] | list[float]:
        """Return the labels as the model takes them, or name the first that cannot be one."""
        if self.is_regression:
            return [_value(value, origin, row) for row, value in enumerate(values, start=1)]
        number = {name.lower(): index for index, name in enumerate(self.names)}
        found = [number.get(_name(value, self.meanings).lower(), -1) for value in values]
        if -1 in found:
            row = found.index(-1)
            raise BadInput(
                f"Cannot use the label {values[row]!r} of {origin}, row {row + 1}.",
                why=f"the labels are {', '.join(map(repr, self.names))}.",
                fix="correct that row, or train on a file that holds every label.",
            )
        return found


def columns_of(table: TextTable, task: GlueTask | None) -> Columns:
    """Return the columns that a task needs, or those of a table without one.

    >>> columns_of(TextTable({"text": ["a"], "label": [1]}, "x.csv"), None)
    Columns(first='text', second=None, label='label')
    """
    if task is not None:
        first = _pick(table, task.first, task)
        second = _pick(table, task.second, task) if task.second else None
        label = next((name for name in task.label if name in table.columns), None)
        return Columns(first, second, label)
    label = "label" if "label" in table.columns else None
    texts = [name for name in table.columns if name != label]
    if not texts:
        raise BadInput(
            f"{table.origin} has no text.",
            why=f"its columns are {', '.join(map(repr, table.columns))}.",
            fix="give it one column of texts, or two for pairs, beside the label.",
        )
    if {"sentence1", "sentence2"} <= set(texts):
        return Columns("sentence1", "sentence2", label)
    texts = [name for name in texts if name.lower() not in _NUMBERS_OF_ROWS] or texts
    return Columns(texts[0], texts[1] if len(texts) > 1 else None, label)


def _pick(table: TextTable, names: tuple[str, ...], task: GlueTask) -> str:
    for name in names:
        if name in table.columns:
            return name
    raise BadInput(
        f"{table.origin} has no column {names[0]!r}.",
        why=f"task {task.name} reads {', '.join(map(repr, task.columns))}; the file has "
        f"{', '.join(map(repr, table.columns))}.",
        fix=f"rename the column, or leave out --task_name {task.name}.",
    )


def texts_of(table: TextTable, column: str) -> list[str]:
    """Return a column of texts, or name the first row that holds none."""
    values = list(table.columns[column])
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise BadInput(
                f"Cannot read row {row} of column {column!r} in {table.origin}.",
                why=f"it holds {value!r}, and the column's rows must be texts.",
                fix="correct that row. Without --task_name the first two columns beside the label "
                "are read, or sentence1 and sentence2.",
            )
    return values


def find_labels(table: TextTable, task: GlueTask | None, *, trained: bool = True) -> Labels:
    """Return the labels that a table holds; one to be learnt from must hold two or more."""
    label = label_column(table, task)
    if task is not None:
        return Labels(task.labels, task.labels)
    if table.label_names:
        return Labels(table.label_names, table.label_names)
    values = table.columns[label]
    if _are_values(values):
        return Labels(())
    return Labels(_classes(values, table.origin, 2 if trained else 1))


def verify(table: TextTable, task: GlueTask | None, labels: Labels) -> None:
    """Refuse a table to learn from or to evaluate that has a row without its texts or label."""
    columns = columns_of(table, task)
    for name in (columns.first, columns.second):
        if name is not None:
            texts_of(table, name)
    labels.numbers(table.columns[label_column(table, task)], table.origin)


def label_column(table: TextTable, task: GlueTask | None) -> str:
    """Return the column of the labels, or refuse a table without one."""
    label = columns_of(table, task).label
    if label is not None:
        return label
    wanted = task.label[0] if task else "label"
    raise BadInput(
        f"{table.origin} has no column {wanted!r}.",
        why=f"its columns are {', '.join(map(repr, table.columns))}.",
        fix=f"name the column with the labels {wanted!r}.",
    )


def adopt(labels: Labels, known: Mapping[str, int] | None, *, trained: bool) -> Labels | None:
    """Return the labels in the order of a model's own mapping; None where it does not fit.

    A model that is not to be trained may know more labels than a small file holds.
    """
    if known is None or labels.is_regression:
        return labels
    ordered = tuple(sorted(known, key=known.__getitem__))
    if sorted(known.values()) != list(range(len(known))):
        return None
    ours, theirs = ({name.lower() for name in names} for names in (labels.names, ordered))
    if ours == theirs or (ours < theirs and not trained):
        return replace(labels, names=ordered)
    return None


def _name(value: Any, meanings: tuple[str, ...]) -> str:
    """Return the class a cell of the data means."""
    number = _whole(value)
    if number is None:
        return str(value).strip()
    if not meanings:
        return str(number)
    return meanings[number] if 0 <= number < len(meanings) else str(number)


def _classes(values: Sequence[Any], origin: str, fewest: int) -> tuple[str, ...]:
    for row, value in enumerate(values, start=1):
        if value is None or str(value).strip() == "":
            raise BadInput(
                f"Row {row} of {origin} has no label.",
                why="every row that is learnt from needs one.",
                fix="give it a label, or take the row out.",
            )
    whole = {_whole(value) for value in values}
    if None in whole:
        names = tuple(sorted({_name(value, ()) for value in values}))
    else:
        names = tuple(map(str, sorted(number for number in whole if number is not None)))
    if len(names) < fewest:
        raise BadInput(
            f"Every row of {origin} has the label {names[0]!r}.",
            why="there is nothing to tell apart.",
            fix="give a file with two labels or more.",
        )
    return names


def _are_values(values: Sequence[Any]) -> bool:
    """Whether these are numbers, and at least one is written with a point."""
    if any(_float(value) is None for value in values):
        return False
    return any(_whole(value) is None for value in values)


def _whole(value: Any) -> int | None:
    if isinstance(value, float):
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _value(value: Any, origin: str, row: int) -> float:
    number = _float(value)
    if number is None or not math.isfinite(number):
        raise BadInput(
            f"Cannot use the label {value!r} of {origin}, row {row}.",
            why="this job predicts a value, so every label must be a finite number.",
            fix="correct that row, or write the labels as words or whole numbers for classes.",
        )
    return number
