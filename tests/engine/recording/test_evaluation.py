"""The figures of an evaluation, and their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from anytrain.engine.recording.evaluation import RankVerdicts, figures, store

NAN = float("nan")


def classes(label: Any, said: Any, sure: Any = None, num: int = 3) -> RankVerdicts:
    sure = np.full(len(label), 0.5) if sure is None else sure
    rows = np.array([label, said, sure], np.float32)
    return RankVerdicts("classification", num, rows, (len(label),), samples=range(len(label)))


def values(true: Any, said: Any) -> RankVerdicts:
    rows = np.array([true, said], np.float32)
    return RankVerdicts("regression", 0, rows, (len(true),), samples=range(len(true)))


def test_counts_and_scores_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    label, said = draw.integers(0, 4, 500), draw.integers(0, 4, 500)
    label[label == 3] = 2  # a class that is said and never there
    found = figures(classes(label, said, num=5))
    whole = list(range(5))
    assert found["confusion"] == metrics.confusion_matrix(label, said, labels=whole).tolist()
    scores = metrics.precision_recall_fscore_support(label, said, labels=whole, zero_division=0)
    for name, expected in zip(("precision", "recall", "f1", "support"), scores, strict=True):
        got = [each[name] for each in found["per_class"]]
        np.testing.assert_allclose(got, expected, atol=1e-6)
    assert found["num_samples"] == 500
    assert "note" not in found


def test_the_most_confidently_wrong_come_first() -> None:
    found = figures(classes([0, 0, 1, 2], [1, 0, 2, 0], [0.5, 0.99, 0.7, NAN]), ["a", "b", "c"])
    assert [(w["index"], w["label"], w["predicted"], w["confidence"]) for w in found["worst"]] == [
        (2, "b", "c", 0.7),
        (0, "a", "b", 0.5),
        (3, "c", None, None),
    ]


def test_what_is_no_number_is_wrong_and_counted() -> None:
    found = figures(classes([0, 1, 1], [0, 0, 1], [0.9, NAN, NAN], num=2))
    assert found["num_undecided"] == 2
    assert found["note"] == "Samples whose score is not a number count as wrong: 2."
    assert found["confusion"] == [[1, 0], [0, 0]]
    assert found["per_class"][1] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 2}
    assert [each["confidence"] for each in found["worst"]] == [None, None]
    everything = figures(values([1.0, 2.0], [NAN, float("inf")]))
    assert everything["num_undecided"] == 2
    assert everything["points"] == []
    assert sum(everything["residuals"]["counts"]) == 0
    assert everything["worst"][0]["error"] is None


def test_samples_without_a_class_do_not_count() -> None:
    found = figures(classes([0, -100, 1, 7], [0, 1, 0, 1], num=2))
    assert found["num_samples"] == 2
    assert [each["index"] for each in found["worst"]] == [2]


def test_of_many_classes_the_most_confused_are_shown() -> None:
    label = np.concatenate([np.arange(120), np.repeat(np.arange(40, 65), 3)])
    said = label.copy()
    said[120:] = (label[120:] + 1) % 120
    found = figures(classes(label, said, num=120), [f"c{n}" for n in range(120)])
    assert len(found["classes"]) == len(found["confusion"]) == len(found["per_class"]) == 21
    assert found["classes"][-1] == "other"
    assert set(found["classes"][:-1]) <= {f"c{n}" for n in range(40, 66)}
    assert np.sum(found["confusion"]) == len(label)
    assert sum(each["support"] for each in found["per_class"]) == len(label)
    assert "Of 120 classes the 20 with the most mistakes" in found["note"]
    assert len(found["worst"]) == 20


def test_residuals_are_what_was_said_less_what_is_true() -> None:
    true = np.linspace(0, 5, 3000)
    said = true + np.where(np.arange(3000) == 1234, 4.0, 0.25)
    found = figures(values(true, said))
    assert sum(found["residuals"]["counts"]) == 3000
    edges = found["residuals"]["edges"]
    assert len(edges) == len(found["residuals"]["counts"]) + 1
    assert edges[0] == pytest.approx(0.25, abs=1e-4)
    assert edges[-1] == pytest.approx(4.0, abs=1e-4)
    assert len(found["points"]) == 1000
    worst = found["worst"][0]
    assert worst["index"] == 1234
    assert worst["error"] == pytest.approx(4.0, abs=1e-4)


def test_errors_that_are_all_alike_have_a_histogram_too() -> None:
    found = figures(values([1.0, 2.0], [1.5, 2.5]))
    assert sum(found["residuals"]["counts"]) == 2
    assert np.all(np.diff(found["residuals"]["edges"]) > 0)


def test_a_file_is_named_after_its_set_and_stays_in_its_folder(tmp_path: Path) -> None:
    assert store(tmp_path / "new", "eval", {"step": 3}).name == "evaluation.json"
    path = store(tmp_path, "../dev set", {"step": 3})
    assert path.parent == tmp_path
    assert path.name.startswith("evaluation-.._dev_set-")
    assert store(tmp_path, "a b", {}) != store(tmp_path, "a/b", {})
    assert store(tmp_path, "dev", {}).name == "evaluation-dev.json"
    assert json.loads(path.read_text()) == {"format": 1, "step": 3, "split": "../dev set"}
    assert list(tmp_path.glob("*.new")) == []
