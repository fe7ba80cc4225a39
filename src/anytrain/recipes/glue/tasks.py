"""The nine GLUE tasks: their columns, labels, metrics and splits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a task's data: how run_glue names it, and how its data set does."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Task:
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
        Task(
            "cola",
            _SENTENCE,
            (),
            ("unacceptable", "acceptable"),
            ("matthews_correlation",),
            bare_columns=("source", "label", "star", "sentence"),
        ),
        Task("sst2", _SENTENCE, (), ("negative", "positive"), ("accuracy",)),
        Task(
            "mrpc",
            ("sentence1", "#1 String"),
            ("sentence2", "#2 String"),
            ("not_equivalent", "equivalent"),
            _SCORES,
            label=("label", "Quality"),
        ),
        Task("stsb", *_PAIR, (), ("pearson", "spearmanr"), label=("label", "score")),
        Task(
            "qqp",
            ("question1",),
            ("question2",),
            _DUPLICATES,
            _SCORES,
            label=("label", "is_duplicate"),
        ),
        Task(
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
        Task("qnli", ("question",), ("sentence",), _ENTAILED, ("accuracy",)),
        Task("rte", *_PAIR, _ENTAILED, ("accuracy",)),
        Task("wnli", *_PAIR, ("not_entailment", "entailment"), ("accuracy",)),
    )
}
