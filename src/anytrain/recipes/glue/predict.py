"""Write predictions as GLUE takes them: a header, then one index and prediction a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anytrain.recipes.glue.labels import Labels


def file_name(split: str | None) -> str:
    """Return the file of a task's predictions, or of a job's without a task.

    >>> file_name("mnli-mm"), file_name(None)
    ('predict_results_mnli-mm.txt', 'predict_results.txt')
    """
    return f"predict_results_{split}.txt" if split else "predict_results.txt"


def lines(predictions: Sequence[Any], labels: Labels) -> list[str]:
    """Return the lines of the file: the label's name, or a value with three places.

    >>> lines([1, 0], Labels(("no", "yes")))
    ['index\\tprediction', '0\\tyes', '1\\tno']
    """
    said = [f"{p:3.3f}" if labels.is_regression else labels.names[int(p)] for p in predictions]
    return ["index\tprediction", *(f"{index}\t{word}" for index, word in enumerate(said))]


def write(path: Path, predictions: Sequence[Any], labels: Labels) -> None:
    """Write the file of one set's predictions."""
    path.write_text("\n".join(lines(predictions, labels)) + "\n", encoding="utf-8")
