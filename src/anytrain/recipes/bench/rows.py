"""The rows that all contenders learn from: real pairs, or made up with MRPC's lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anytrain.recipes.bench.settings import SIZES, BenchSettings
from anytrain.recipes.glue.encode import Encoded

Array = np.ndarray[Any, Any]
Columns = dict[str, Sequence[Any]]

_MEAN, _SPREAD, _SHORTEST, _LONGEST = 53, 13, 19, 110  # MRPC's, in tokens of BERT
_FIRST_WORD = 10  # the ids below are left to padding, the marks at both ends and the signs
_BEGIN, _END, _SIGNS = 1, 2, (3, 4)
_SHARE_OF_SIGNS = 0.5
_SHARE_OF_WRONG_LABELS = 0.1


def write(settings: BenchSettings, folder: Path) -> None:
    """Write the rows to learn from and those held out, once for all contenders."""
    for part in ("train", "eval"):
        columns, labels = _real(settings, part) if settings.data else _made(settings, part)
        begins = np.cumsum([0, *map(len, columns["input_ids"])])
        flat: dict[str, Any] = {name: np.concatenate(rows) for name, rows in columns.items()}
        np.savez(folder / f"{part}.npz", begins=begins, row_labels=labels, **flat)


def load(folder: Path, part: str) -> Encoded:
    """Return rows that `write` wrote."""
    with np.load(folder / f"{part}.npz") as found:
        kept = {name: found[name] for name in found.files}
    begins, labels = kept.pop("begins"), kept.pop("row_labels")
    columns: Columns = {name: np.split(flat, begins[1:-1]) for name, flat in kept.items()}
    return Encoded(columns, labels.tolist() if len(labels) else None)


def filling(settings: BenchSettings, num_rows: int, length: int, vocabulary: int) -> Encoded:
    """Return rows for batches of one shape: as long as it, or up to a third shorter."""
    random = np.random.default_rng(0)
    if settings.head == "causal":
        return Encoded(_texts(random, num_rows, length, vocabulary)[0])
    shortest = length if settings.is_even else max(2 * length // 3, 3)
    lengths = random.integers(shortest, length + 1, num_rows)
    columns, labels = _marked(random, lengths, vocabulary)
    return Encoded(columns, labels.tolist())


def _made(settings: BenchSettings, part: str) -> tuple[Columns, Array]:
    size = SIZES[settings.size]
    random = np.random.default_rng(17 if part == "train" else 18)
    count = size.num_rows if part == "train" else size.num_eval_rows
    vocabulary = size.config.get("vocab_size", 30_000)
    if size.head == "causal":
        return _texts(random, count, settings.length, vocabulary)
    lengths = np.full(count, settings.length)
    if not size.even:
        drawn = random.normal(_MEAN, _SPREAD, count).round()
        lengths = drawn.clip(_SHORTEST, min(_LONGEST, settings.length)).astype(int)
    return _marked(random, lengths, vocabulary)


def _marked(random: Any, lengths: Array, vocabulary: int) -> tuple[Columns, Array]:
    """Return rows of random words, some of which are their label's sign.

    A tenth of the labels are wrong, so that a loss has a floor that all must come down to.
    """
    truth = random.integers(0, 2, len(lengths))
    ids = []
    for length, label in zip(lengths.tolist(), truth.tolist(), strict=True):
        row = random.integers(_FIRST_WORD, vocabulary, length, dtype=np.int32)
        row[random.random(length) < _SHARE_OF_SIGNS] = _SIGNS[label]
        row[0], row[-1] = _BEGIN, _END
        ids.append(row)
    wrong = random.random(len(lengths)) < _SHARE_OF_WRONG_LABELS
    return _with_masks(ids), np.where(wrong, 1 - truth, truth)


def _with_masks(ids: Sequence[Array]) -> Columns:
    return {
        "input_ids": list(ids),
        "token_type_ids": [np.zeros_like(row) for row in ids],
        "attention_mask": [np.ones_like(row) for row in ids],
    }


def _texts(random: Any, count: int, length: int, vocabulary: int) -> tuple[Columns, Array]:
    """Return texts in which every second word follows from the one before it."""
    words = random.integers(0, vocabulary, (count, length), dtype=np.int32)
    ahead = min(vocabulary, 1000)  # few enough to be seen often
    words[:, 0::2] %= ahead
    words[:, 1::2] = (7 * words[:, 0 : 2 * (length // 2) : 2] + 3) % vocabulary
    return {"input_ids": list(words), "labels": list(words)}, np.array([])


def _real(settings: BenchSettings, part: str) -> tuple[Columns, Array]:
    from transformers import AutoTokenizer

    from anytrain.recipes.glue.sources import read
    from anytrain.recipes.glue.tasks import TASKS, find_labels

    table = read(Path(str(settings.data), f"{'train' if part == 'train' else 'dev'}.tsv.gz"))
    labels = find_labels(table, TASKS["mrpc"], trained=True)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    first, second, truth = (table.columns[name] for name in ("sentence1", "sentence2", "label"))
    found = tokenizer(first, second, truncation=True, max_length=settings.length)
    columns: Columns = {
        name: [np.asarray(row, dtype=np.int32) for row in rows] for name, rows in found.items()
    }
    return columns, np.asarray(labels.numbers(truth, table.origin))
