"""Scores that grow batch by batch: they keep counts and moments, not predictions.

Each takes what a model returned and the labels, as tensors or arrays. Copies from a device are
read one batch late, so that it need not wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from anytrain.core.errors import BadInput, WrongOrder
from anytrain.engine.metrics.collected import Arrivals
from anytrain.engine.objective import IGNORED

Average: TypeAlias = Literal["binary", "macro", "micro", "weighted"]
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Floats: TypeAlias = npt.NDArray[np.float64]


@runtime_checkable
class Metric(Protocol):
    """A score that is told of one batch at a time."""

    def update(self, predictions: Any, labels: Any) -> None:
        """Take one batch into account."""

    def compute(self) -> dict[str, float]:
        """Return the named scores over all batches since the last reset."""

    def reset(self) -> None:
        """Forget every batch."""


class _Growing(ABC):
    """A score over pairs of host arrays, fed one batch late."""

    def __init__(self) -> None:
        self._arrivals = Arrivals()
        self._num_samples = 0
        self._clear()

    def update(self, predictions: Any, labels: Any) -> None:
        self._digest(self._arrivals.send(self._pair(_first(predictions), _first(labels))))

    def compute(self) -> dict[str, float]:
        """Return the score by its name over all batches since the last reset."""
        self._digest(self._arrivals.last())
        if self._num_samples == 0:
            raise WrongOrder(
                f"{type(self).__name__} has nothing to score.",
                why="no sample with a label was given to it since the last reset.",
                fix="call update(predictions, labels) first, or evaluate on data with labels.",
            )
        return self._scores()

    def reset(self) -> None:
        self._arrivals.last()
        self._num_samples = 0
        self._clear()

    def _digest(self, pair: Pair | None) -> None:
        if pair is not None:
            self._num_samples += self._count(*(each.numpy() for each in pair))

    @abstractmethod
    def _pair(self, predictions: torch.Tensor, labels: torch.Tensor) -> Pair: ...
    @abstractmethod
    def _count(self, predictions: Any, labels: Any) -> int:
        """Take arrays into account and return how many samples counted."""

    @abstractmethod
    def _scores(self) -> dict[str, float]: ...
    @abstractmethod
    def _clear(self) -> None: ...


class _Confusion(_Growing):
    """Counts of (true class, predicted class); samples labelled -100 do not count.

    Predictions are classes, or scores with one more dimension: the highest wins.
    """

    def _clear(self) -> None:
        self._table = np.zeros((2, 2), np.int64)

    def _pair(self, predictions: torch.Tensor, labels: torch.Tensor) -> Pair:
        if predictions.ndim == labels.ndim + 1 and predictions.shape[-1] > 1:
            predictions = predictions.argmax(-1)
        if predictions.shape != labels.shape or predictions.is_floating_point():
            raise BadInput(
                f"{type(self).__name__} cannot read classes from predictions of shape "
                f"{tuple(predictions.shape)} and {predictions.dtype}, labels of shape "
                f"{tuple(labels.shape)}.",
                why="it takes whole numbers shaped like the labels, or a score for each class "
                "in one more dimension.",
                fix="pass classes: threshold a single score yourself, in "
                "preprocess_logits_for_metrics.",
            )
        return predictions.reshape(-1).long(), labels.reshape(-1).long()

    def _count(self, predictions: Any, labels: Any) -> int:
        counted = labels != IGNORED
        predictions, labels = predictions[counted], labels[counted]
        if not len(labels):
            return 0
        if min(labels.min(), predictions.min()) < 0:
            raise BadInput(
                f"{type(self).__name__} was given a negative class.",
                why="classes are counted from 0; -100 as a label means: do not count.",
                fix="map the labels to 0, 1, 2 ...",
            )
        size = max(len(self._table), int(labels.max()) + 1, int(predictions.max()) + 1)
        missing = size - len(self._table)
        self._table = np.pad(self._table, ((0, missing), (0, missing)))
        np.add.at(self._table, (labels, predictions), 1)
        return len(labels)


class Accuracy(_Confusion):
    """The share of right answers."""

    def _clear(self) -> None:
        self._right = 0

    def _count(self, predictions: Any, labels: Any) -> int:
        counted = labels != IGNORED
        self._right += int(((predictions == labels) & counted).sum())
        return int(counted.sum())

    def _scores(self) -> dict[str, float]:
        return {"accuracy": self._right / self._num_samples}


class F1(_Confusion):
    """The harmonic mean of precision and recall, as scikit-learn averages it over classes.

    `positive` is the class that "binary" asks about. `name` is the key of the score.
    """

    def __init__(self, average: Average = "binary", positive: int = 1, name: str = "f1") -> None:
        if average not in ("binary", "macro", "micro", "weighted"):
            raise BadInput(
                f"F1 cannot average by {average!r}.",
                why='it knows "binary", "macro", "micro" and "weighted".',
                fix='pass average="macro" for more than two classes.',
            )
        self._average, self._positive, self._name = average, positive, name
        super().__init__()

    def _scores(self) -> dict[str, float]:
        right = np.diag(self._table).astype(np.float64)
        true, predicted = self._table.sum(1), self._table.sum(0)
        if self._average == "micro":
            return {self._name: float(right.sum() / true.sum())}
        present = (true + predicted) > 0
        each = np.zeros(len(right))
        each[present] = 2 * right[present] / (true + predicted)[present]
        if self._average == "binary":
            return {self._name: self._binary(each, present)}
        weights = true[present] if self._average == "weighted" else None
        return {self._name: float(np.average(each[present], weights=weights))}

    def _binary(self, each: Floats, present: npt.NDArray[np.bool_]) -> float:
        if present.sum() > 2:
            raise BadInput(
                f"F1 of one class asked for, and {int(present.sum())} classes are there.",
                why='average="binary" is for two classes.',
                fix='pass F1(average="macro"), "micro" or "weighted".',
            )
        return float(each[self._positive]) if self._positive < len(each) else 0.0


class Matthews(_Confusion):
    """Matthews' correlation of true and predicted classes, for two or more of them."""

    def _scores(self) -> dict[str, float]:
        true, predicted = self._table.sum(1).astype(float), self._table.sum(0).astype(float)
        num, right = float(self._num_samples), float(np.trace(self._table))
        # Shares, not counts: products of four counts leave float64's whole numbers.
        true, predicted, right = true / num, predicted / num, right / num
        spread = (1 - float(true @ true)) * (1 - float(predicted @ predicted))
        covered = right - float(true @ predicted)
        return {"matthews_correlation": float(covered / np.sqrt(spread)) if spread > 0 else 0.0}


class _Numbers(_Growing):
    """A score over numbers shaped alike; a last dimension of one is dropped."""

    def _pair(self, predictions: torch.Tensor, labels: torch.Tensor) -> Pair:
        if predictions.ndim == labels.ndim + 1 and predictions.shape[-1] == 1:
            predictions = predictions.squeeze(-1)
        if predictions.shape != labels.shape:
            raise BadInput(
                f"{type(self).__name__} cannot compare predictions of shape "
                f"{tuple(predictions.shape)} with labels of shape {tuple(labels.shape)}.",
                why="it takes one number for each label.",
                fix="return predictions shaped like the labels.",
            )
        return predictions.reshape(-1), labels.reshape(-1)

    def _digest(self, pair: Pair | None) -> None:
        # Widened on the host: not every device has float64.
        super()._digest(None if pair is None else (pair[0].double(), pair[1].double()))


class MeanSquaredError(_Numbers):
    """The mean of squared differences."""

    def _clear(self) -> None:
        self._sum = 0.0

    def _count(self, predictions: Any, labels: Any) -> int:
        self._sum += float(((predictions - labels) ** 2).sum())
        return int(labels.size)

    def _scores(self) -> dict[str, float]:
        return {"mse": self._sum / self._num_samples}


class Pearson(_Numbers):
    """Pearson's correlation, from means and products of differences; NaN where one is constant."""

    def _clear(self) -> None:
        self._mean = np.zeros(2)
        self._products = np.zeros((2, 2))

    def _count(self, predictions: Any, labels: Any) -> int:
        both = np.stack([predictions, labels])
        new, old = int(both.shape[1]), self._num_samples
        if new == 0:
            return 0
        mean = both.mean(1)
        apart = mean - self._mean
        centred = both - mean[:, None]
        # Two sets' products of differences add up, but for the distance of their means.
        self._products += centred @ centred.T + np.outer(apart, apart) * (old * new / (old + new))
        self._mean += apart * (new / (old + new))
        return new

    def _scores(self) -> dict[str, float]:
        return {"pearson": _correlation(self._products)}


class Spearman(_Numbers):
    """Spearman's rank correlation; ranks need every sample, so it keeps two floats of each."""

    def _clear(self) -> None:
        self._kept: list[Floats] = []

    def _count(self, predictions: Any, labels: Any) -> int:
        self._kept.append(np.stack([predictions, labels]))
        return int(labels.size)

    def _scores(self) -> dict[str, float]:
        both = np.concatenate(self._kept, axis=1)
        if np.isnan(both).any():
            return {"spearmanr": float("nan")}
        ranks = np.stack([_ranks(both[0]), _ranks(both[1])])
        centred = ranks - ranks.mean(1, keepdims=True)
        return {"spearmanr": _correlation(centred @ centred.T)}


class Together:
    """Several metrics as one.

    >>> both = Together(Accuracy(), F1())
    >>> both.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    >>> sorted(both.compute())
    ['accuracy', 'f1']
    """

    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def update(self, predictions: Any, labels: Any) -> None:
        """Take one batch into account, in every metric."""
        for metric in self._metrics:
            metric.update(predictions, labels)

    def compute(self) -> dict[str, float]:
        """Return the scores of all metrics."""
        scores: dict[str, float] = {}
        for metric in self._metrics:
            for name, value in metric.compute().items():
                if name in scores:
                    raise BadInput(
                        f"Two metrics are called {name!r}.",
                        why="one score would hide the other.",
                        fix=f'name them: F1(average="macro", name="{name}_macro").',
                    )
                scores[name] = value
        return scores

    def reset(self) -> None:
        """Forget every batch, in every metric."""
        for metric in self._metrics:
            metric.reset()


def _first(value: Any) -> torch.Tensor:
    """Return a model's main output: the first of several."""
    while isinstance(value, (tuple, list)) and value and not np.isscalar(value[0]):
        value = value[0]
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    return tensor.detach()


def _correlation(products: Floats) -> float:
    spread = float(np.sqrt(products[0, 0]) * np.sqrt(products[1, 1]))
    return float(products[0, 1]) / spread if spread != 0 else float("nan")


def _ranks(values: Floats) -> Floats:
    """Return each value's place in order; equal values share the mean of their places."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    places: Floats = (last - (counts - 1) / 2)[inverse]
    return places
