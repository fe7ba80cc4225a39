"""Metrics, by the names GLUE gives them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from anytrain.recipes.glue import job
from anytrain.recipes.glue.scores import Scorer, metrics_of, reducer
from anytrain.recipes.glue.tasks import TASKS, Labels

TRUE = np.array([1, 1, 1, 0, 0, 1])
SAID = np.array([1, 0, 1, 1, 0, 1])
# Counted by hand: 3 true positives, 1 false positive, 1 false negative, 1 true negative.
EXPECTED = {"accuracy": 4 / 6, "f1": 6 / 8, "matthews_correlation": (3 - 1) / 8}


@pytest.mark.parametrize("name", [n for n, task in TASKS.items() if task.labels])
def test_a_task_of_classes_is_scored_by_its_metrics(name: str) -> None:
    metrics = TASKS[name].metrics
    scores = Scorer(metrics)(SimpleNamespace(predictions=SAID, label_ids=TRUE))
    for metric in metrics:
        assert scores[metric] == pytest.approx(EXPECTED[metric])
    assert ("combined_score" in scores) == (len(metrics) > 1)


def test_batches_are_scored_together_at_the_last_one() -> None:
    scorer = Scorer(("accuracy", "f1"))
    for begin in (0, 2, 4):
        part = slice(begin, begin + 2)
        batch = SimpleNamespace(
            predictions=torch.tensor(SAID[part]), label_ids=torch.tensor(TRUE[part])
        )
        scores = scorer(batch, compute_result=begin == 4)
        assert bool(scores) == (begin == 4)
    assert scores == Scorer(("accuracy", "f1"))(SimpleNamespace(predictions=SAID, label_ids=TRUE))


def test_f1_looks_for_the_class_that_the_task_calls_positive() -> None:
    turned = SimpleNamespace(predictions=1 - SAID, label_ids=1 - TRUE)
    assert Scorer(("f1",), positive=0)(turned)["f1"] == pytest.approx(EXPECTED["f1"])


def test_values_are_scored_by_correlation_and_by_squared_error() -> None:
    given = SimpleNamespace(predictions=np.array([1.0, 2.0, 4.0]), label_ids=np.array([1, 2, 3]))
    scores = Scorer(TASKS["stsb"].metrics)(given)
    assert scores["spearmanr"] == pytest.approx(1.0)
    assert scores["pearson"] == pytest.approx(np.corrcoef([1, 2, 4], [1, 2, 3])[0, 1])
    assert scores["combined_score"] == pytest.approx((scores["spearmanr"] + scores["pearson"]) / 2)
    assert metrics_of(None, Labels(())) == ("mse",)
    assert Scorer(("mse",))(given)["mse"] == pytest.approx(1 / 3)


def test_one_number_a_row_is_kept_of_the_logits() -> None:
    logits = torch.tensor([[0.0, 2.0], [3.0, 1.0]])
    assert reducer(Labels(("a", "b")))((logits, "more"), None).tolist() == [1, 0]
    assert reducer(Labels(()))(torch.tensor([[0.5], [1.5]]), None).tolist() == [0.5, 1.5]


def test_predictions_are_written_as_glue_takes_them() -> None:
    labels = Labels(TASKS["mrpc"].labels)
    assert job.prediction_lines(np.array([1, 0]), labels) == [
        "index\tprediction",
        "0\tequivalent",
        "1\tnot_equivalent",
    ]
    assert job.prediction_lines(np.array([2.0, 3.14159]), Labels(()))[1:] == [
        "0\t2.000",
        "1\t3.142",
    ]
