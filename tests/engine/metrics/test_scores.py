"""Scores that grow batch by batch equal those of scikit-learn and scipy over everything."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics as reference
import torch

from anytrain.core.errors import BadInput, WrongOrder
from anytrain.engine.metrics import (
    F1,
    Accuracy,
    Matthews,
    MeanSquaredError,
    Metric,
    Pearson,
    Spearman,
    Together,
)


def in_batches(metric, predictions, labels, size: int = 7) -> dict[str, float]:
    for start in range(0, len(labels), size):
        metric.update(predictions[start : start + size], labels[start : start + size])
    return metric.compute()


@pytest.fixture(params=[2, 5], ids=["two classes", "five classes"])
def classes(request):
    torch.manual_seed(request.param)
    labels = torch.randint(request.param, (101,))
    logits = torch.randn(101, request.param) + 2 * torch.nn.functional.one_hot(labels)
    return logits, labels, logits.argmax(-1).numpy(), labels.numpy()


def test_accuracy_and_matthews_equal_scikit_learn(classes) -> None:
    logits, labels, guessed, true = classes
    accuracy = in_batches(Accuracy(), logits, labels)["accuracy"]
    assert accuracy == pytest.approx(reference.accuracy_score(true, guessed), abs=1e-12)
    found = in_batches(Matthews(), logits, labels)["matthews_correlation"]
    assert found == pytest.approx(reference.matthews_corrcoef(true, guessed), abs=1e-12)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_over_classes_equals_scikit_learn(classes, average) -> None:
    logits, labels, guessed, true = classes
    found = in_batches(F1(average), logits, labels)["f1"]
    assert found == pytest.approx(reference.f1_score(true, guessed, average=average), abs=1e-12)


def test_f1_of_a_class_nobody_saw_is_left_out_as_scikit_learn_does() -> None:
    true, guessed = torch.tensor([0, 4, 4, 0]), torch.tensor([0, 4, 0, 0])
    found = in_batches(F1("macro"), guessed, true)["f1"]
    assert found == pytest.approx(reference.f1_score(true, guessed, average="macro"), abs=1e-12)


@pytest.mark.parametrize("positive", [0, 1])
def test_f1_of_one_class_equals_scikit_learn(positive: int) -> None:
    torch.manual_seed(3)
    true, guessed = torch.randint(2, (50,)), torch.randint(2, (50,))
    found = in_batches(F1(positive=positive), guessed, true)["f1"]
    assert found == pytest.approx(reference.f1_score(true, guessed, pos_label=positive), abs=1e-12)


def test_f1_without_any_positive_is_zero() -> None:
    assert in_batches(F1(), torch.zeros(4).long(), torch.zeros(4).long()) == {"f1": 0.0}


def test_f1_of_one_class_among_many_is_refused() -> None:
    with pytest.raises(BadInput, match="3 classes"):
        in_batches(F1(), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))
    with pytest.raises(BadInput, match="average"):
        F1("mean")  # type: ignore[arg-type]


def test_matthews_of_one_class_is_zero_as_scikit_learn_says() -> None:
    same = torch.ones(5).long()
    assert in_batches(Matthews(), same, same) == {"matthews_correlation": 0.0}


def test_token_labels_of_minus_100_do_not_count() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 9, 4), torch.randint(4, (6, 9))
    labels[:, 6:] = -100
    counted = labels != -100
    true, guessed = labels[counted], logits.argmax(-1)[counted]
    found = in_batches(Together(Accuracy(), F1("macro"), Matthews()), logits, labels, size=2)
    assert found == {
        "accuracy": pytest.approx(reference.accuracy_score(true, guessed)),
        "f1": pytest.approx(reference.f1_score(true, guessed, average="macro")),
        "matthews_correlation": pytest.approx(reference.matthews_corrcoef(true, guessed)),
    }


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16])
def numbers(request):
    torch.manual_seed(1)
    labels = torch.rand(211, dtype=torch.float64) * 5
    predictions = (labels + torch.randn(211) + 1000).to(request.param)
    labels = (labels * 2).round().to(request.param)  # many ties
    return predictions, labels, predictions.double().numpy(), labels.double().numpy()


def test_correlations_equal_scipy(numbers) -> None:
    predictions, labels, x, y = numbers
    found = in_batches(Together(Pearson(), Spearman()), predictions[:, None], labels)
    assert found["pearson"] == pytest.approx(scipy.stats.pearsonr(x, y)[0], abs=1e-9)
    assert found["spearmanr"] == pytest.approx(scipy.stats.spearmanr(x, y)[0], abs=1e-12)


def test_mean_squared_error_equals_scikit_learn(numbers) -> None:
    predictions, labels, x, y = numbers
    found = in_batches(MeanSquaredError(), predictions, labels)["mse"]
    assert found == pytest.approx(reference.mean_squared_error(y, x), rel=1e-12)


def test_moments_keep_their_digits_far_from_zero() -> None:
    rng = np.random.default_rng(0)
    x = 1e7 + rng.standard_normal(1000)
    y = x - 1e7 + rng.standard_normal(1000)
    found = in_batches(Pearson(), x, y, size=10)["pearson"]
    assert found == pytest.approx(scipy.stats.pearsonr(x, y)[0], abs=1e-7)


def test_the_correlation_with_a_constant_is_nan() -> None:
    for metric in (Pearson(), Spearman()):
        assert np.isnan([*in_batches(metric, torch.ones(4), torch.arange(4.0)).values()]).all()


def test_arrays_and_the_first_of_several_outputs_are_taken() -> None:
    logits, labels = np.eye(3, dtype=np.float32), np.array([0, 1, 0])
    assert in_batches(Accuracy(), logits, labels) == {"accuracy": pytest.approx(2 / 3)}
    metric = Accuracy()
    metric.update((torch.tensor(logits), torch.zeros(3, 9)), torch.tensor(labels))
    assert metric.compute() == {"accuracy": pytest.approx(2 / 3)}


def test_a_score_can_be_read_on_the_way_and_begun_again() -> None:
    metric = Accuracy()
    metric.update(torch.tensor([1]), torch.tensor([1]))
    assert metric.compute() == {"accuracy": 1.0}
    metric.update(torch.tensor([1]), torch.tensor([0]))
    assert metric.compute() == {"accuracy": 0.5}
    metric.update(torch.tensor([1]), torch.tensor([1]))
    metric.reset()
    metric.update(torch.tensor([1]), torch.tensor([0]))
    assert metric.compute() == {"accuracy": 0.0}


def test_tensors_that_are_overwritten_afterwards_were_counted_as_they_were() -> None:
    metric, guessed, labels = Accuracy(), torch.tensor([1, 1]), torch.tensor([1, 1])
    metric.update(guessed, labels)
    guessed.zero_()
    assert metric.compute() == {"accuracy": 1.0}


def test_nothing_to_score_is_an_error() -> None:
    for metric in (Accuracy(), Pearson()):
        with pytest.raises(WrongOrder, match="nothing to score"):
            metric.compute()
    metric = Accuracy()
    metric.update(torch.tensor([1]), torch.tensor([-100]))
    with pytest.raises(WrongOrder):
        metric.compute()


def test_predictions_that_name_no_class_are_refused() -> None:
    for predictions in (torch.rand(4), torch.rand(4, 1), torch.zeros(3).long()):
        with pytest.raises(BadInput, match="cannot read classes"):
            Accuracy().update(predictions, torch.zeros(4).long())
    with pytest.raises(BadInput, match="negative class"):
        in_batches(F1(), torch.tensor([0, 1]), torch.tensor([0, -1]))
    with pytest.raises(BadInput, match="cannot compare"):
        Pearson().update(torch.rand(4, 2), torch.rand(4))


def test_two_scores_of_one_name_are_refused() -> None:
    both = Together(F1("macro"), F1("micro"))
    with pytest.raises(BadInput, match="Two metrics are called 'f1'"):
        in_batches(both, torch.tensor([0, 1]), torch.tensor([0, 1]))
    named = Together(F1("macro"), F1("micro", name="f1_micro"))
    assert sorted(in_batches(named, torch.tensor([0, 1]), torch.tensor([0, 1]))) == [
        "f1",
        "f1_micro",
    ]


def test_each_is_a_metric() -> None:
    every = (Accuracy(), F1(), Matthews(), Pearson(), Spearman(), MeanSquaredError(), Together())
    assert all(isinstance(each, Metric) for each in every)
