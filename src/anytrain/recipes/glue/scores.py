"""GLUE's metrics, computed by scikit-learn and scipy, with nothing to download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from anytrain.core.errors import BadInput
from anytrain.recipes.glue.tasks import GlueTask, Labels

Scores = dict[str, float]
_FROM_SCIPY = ("pearson", "spearmanr")


def metrics_of(task: GlueTask | None, labels: Labels) -> tuple[str, ...]:
    """Return the names of the metrics: the task's, else accuracy or the mean squared error."""
    if task is not None:
        return task.metrics
    return ("mse",) if labels.is_regression else ("accuracy",)


def require(metrics: Sequence[str]) -> None:
    """Refuse to begin a run whose scores could not be computed at its end."""
    needed = {"scipy" if name in _FROM_SCIPY else "sklearn" for name in metrics}
    missing = sorted(library for library in needed if find_spec(library) is None)
    if missing:
        packages = ["scikit-learn" if name == "sklearn" else name for name in missing]
        raise BadInput(
            f"Cannot compute {' and '.join(metrics)}.",
            why=f"{' and '.join(packages)} is not installed.",
            fix=f"pip install {' '.join(packages)}, or leave out --do_eval.",
        )


class Scorer:
    """A `compute_metrics` for predictions that are classes or values already.

    `positive` is the number of the class that F1 looks for. More than one metric brings their
    mean as `combined_score`. With `compute_result` it is told batch by batch, and answers with
    the scores of all of them at the last.
    """

    def __init__(self, metrics: Sequence[str], positive: int = 1) -> None:
        self._metrics, self._positive = tuple(metrics), positive
        self._seen: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        """Forget the batches of an evaluation that was not ended."""
        self._seen.clear()

    def __call__(self, prediction: Any, compute_result: bool = True) -> Scores:
        """Return the scores by name, or none before the last batch."""
        said = prediction.predictions
        said = said[0] if isinstance(said, tuple) else said
        self._seen.append((_flat(said), _flat(prediction.label_ids)))
        if not compute_result:
            return {}
        given, true = (np.concatenate(column) for column in zip(*self._seen, strict=True))
        self._seen.clear()
        scores = {name: _score(name, given, true, self._positive) for name in self._metrics}
        if len(scores) > 1:
            scores["combined_score"] = sum(scores.values()) / len(scores)
        return scores


def _flat(values: Any) -> Any:
    """Return numbers in a row, wherever they are."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values).reshape(-1)


def reducer(labels: Labels) -> Callable[[Any, Any], Any]:
    """Return a `preprocess_logits_for_metrics`: one number a row is kept, not its logits."""

    def reduce(logits: Any, _: Any) -> Any:
        first = logits[0] if isinstance(logits, tuple | list) else logits
        return first.reshape(-1) if labels.is_regression else first.argmax(dim=-1)

    return reduce


def _score(name: str, said: Any, true: Any, positive: int) -> float:
    if name in _FROM_SCIPY:
        from scipy import stats

        correlate = stats.pearsonr if name == "pearson" else stats.spearmanr
        return float(correlate(said, true)[0])
    from sklearn import metrics

    if name == "f1":
        # Of the positive class alone, also where a model has more classes than the data.
        ours = [positive]
        return float(metrics.f1_score(true, said, labels=ours, average="macro", zero_division=0))
    measure = {
        "accuracy": metrics.accuracy_score,
        "matthews_correlation": metrics.matthews_corrcoef,
        "mse": metrics.mean_squared_error,
    }[name]
    return float(measure(true, said))
