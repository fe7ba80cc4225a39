"""What an evaluation showed: which classes were confused, how far values were off.

A few numbers a sample are made where the model ran and stay there until the evaluation is over:
nobody waits for a device, and the scores themselves need not be kept. The figures of all of them
are plain lists and numbers, as a file of JSON holds them. What is no number is None.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from anytrain.core.records import FORMAT, evaluation_name
from anytrain.engine.objective import IGNORED
from anytrain.engine.recording.disk import replace, to_json

Kind: TypeAlias = Literal["classification", "tokens", "regression"]
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[Any]
MOST_ROWS = 1_000_000
"""The samples that one rank counts: 16 MB of numbers, on its device."""
MOST_TOKEN_CLASSES = 50
"""More classes for each token are a vocabulary, and no table of it can be read."""
MOST_CLASSES = 50
"""More classes than these are not shown one by one."""
MOST_CONFUSED = 20
MOST_WORST = 20
_MOST_POINTS = 1000
_NUM_BINS = 30
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class RankVerdicts:
    """One rank's verdicts, on the host.

    `rows` has a column for each sample: the label, what was said, and for classes how sure the
    model was. Of tokens each sample shows its most confidently wrong one and where it is, and
    `table` counts all of them: rows are true classes, columns what was said.
    """

    kind: Kind
    num_classes: int
    rows: Floats
    sizes: tuple[int, ...]
    """The samples of each batch."""
    samples: Sequence[Any] | None = None
    """Each sample's index in the data set, where the loader knows it."""
    table: npt.NDArray[np.int64] | None = None
    supports: npt.NDArray[np.int64] | None = None
    """The tokens of each true class."""
    is_cut: bool = False
    """Whether there were more samples than are counted."""


class Verdicts:
    """The verdicts of one evaluation, batch by batch.

    `look` is given what the model returned for a batch, as often as it is predicted; `end_batch`
    says how many of its rows count. Labels and scores that are no classes, no tokens' classes and
    no values are left alone. With `shifted`, scores are of the next token: nothing is counted.
    """

    def __init__(self, *, shifted: bool = False, is_looking: bool = True) -> None:
        self._shifted = shifted
        self._kind: Kind | None = None
        self._num_classes = 0
        self._is_over = not is_looking
        self._is_cut = False
        self._pending: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._rows: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._num_rows = 0
        self._table: torch.Tensor | None = None
        self.failure: str | None = None
        """What went wrong, in words; nothing is counted after it."""

    @property
    def is_looking(self) -> bool:
        """Whether the next batch's scores are of any use."""
        return not self._is_over

    def look(self, scores: Any, labels: Any) -> None:
        """Judge one batch; never raises."""
        if self._is_over:
            return
        try:
            self._pending = self._judged(_first(scores), _only(labels))
        except Exception as error:  # noqa: BLE001  a picture of the evaluation must not stop it
            self.failure = f"{type(error).__name__}: {error}"
            self._pending = None
        if self._pending is None:
            self._give_up()

    def end_batch(self, num_rows: int) -> None:
        """Keep the first `num_rows` of the batch that was looked at; 0: all that it has."""
        if self._is_over:
            return
        if self._pending is None:  # a rank that has none of the last round
            self._sizes.append(0)
            return
        rows, table = self._pending
        self._pending = None
        size = min(num_rows, rows.shape[1]) or rows.shape[1]
        if self._num_rows + size > MOST_ROWS:
            self._is_over = self._is_cut = True
            return
        self._rows.append(rows)
        self._sizes.append(size)
        self._num_rows += size
        if table is not None:
            self._table = table if self._table is None else self._table + table

    def share(
        self, samples_of: Callable[[int], Sequence[Any] | None] | None = None
    ) -> RankVerdicts | None:
        """Return this rank's verdicts, read from the device; None where it has none.

        `samples_of` tells the samples of a batch by its number.
        """
        if self._kind is None or not self._rows:
            return None
        held = [number for number, size in enumerate(self._sizes) if size]
        pieces = [
            rows.cpu().numpy()[:, : self._sizes[number]]
            for number, rows in zip(held, self._rows, strict=True)
        ]
        table = supports = None
        if self._table is not None:
            counts = self._table.cpu().numpy()
            table, supports = counts[:, :-1], counts[:, -1]
        return RankVerdicts(
            self._kind,
            self._num_classes,
            np.concatenate(pieces, axis=1),
            tuple(self._sizes),
            None if samples_of is None else _samples(self._sizes, samples_of),
            table,
            supports,
            self._is_cut,
        )

    def _give_up(self) -> None:
        self._is_over, self._kind, self._table = True, None, None
        self._rows, self._sizes, self._num_rows = [], [], 0

    def _judged(self, scores: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the batch's numbers, one column a row, and the table of its tokens."""
        kind = kind_of(scores, labels)
        num_classes = 0 if kind in (None, "regression") else int(scores.shape[-1])
        if kind == "tokens" and (self._shifted or num_classes > MOST_TOKEN_CLASSES):
            return None
        if self._kind is None:
            self._kind, self._num_classes = kind, num_classes
        if kind is None or (kind, num_classes) != (self._kind, self._num_classes):
            return None
        with torch.no_grad():
            if kind == "regression":
                return torch.stack((labels.reshape(-1).float(), scores.reshape(-1).float())), None
            # Where a score is no number, how sure it is is none either.
            if kind == "classification":
                sure, said = torch.softmax(scores, -1, dtype=torch.float32).max(-1)
                return torch.stack((labels.float(), said.float(), sure)), None
            scores = scores.float()
            top, said = scores.max(-1)
            # The softmax of the highest: on a CPU, torch's takes 15 times longer for short rows.
            sure = (scores - top.unsqueeze(-1)).exp().sum(-1).reciprocal()
            return _worst_tokens(labels, said, sure), _table(labels, said, sure, num_classes)


def kind_of(scores: Any, labels: Any) -> Kind | None:
    """Return what the labels are: classes, classes of tokens, values, or something else.

    >>> kind_of(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    'classification'
    >>> kind_of(torch.zeros(4, 1), torch.zeros(4))
    'regression'
    """
    if not (isinstance(scores, torch.Tensor) and isinstance(labels, torch.Tensor)):
        return None
    if not scores.is_floating_point() or labels.is_complex() or not labels.ndim:
        return None
    if labels.is_floating_point():
        is_single = labels.ndim == 1 or labels.shape[1:] == (1,)
        alike = scores.shape[:1] == labels.shape[:1] and scores.numel() == labels.numel()
        return "regression" if is_single and alike else None
    if scores.shape[:-1] != labels.shape or scores.shape[-1] < 2:
        return None
    names: dict[int, Kind] = {1: "classification", 2: "tokens"}
    return names.get(labels.ndim)


def _worst_tokens(labels: torch.Tensor, said: torch.Tensor, sure: torch.Tensor) -> torch.Tensor:
    """Return of each row its most confidently wrong token: label, said, how sure, and where.

    A row without one has IGNORED in the label's place.
    """
    is_wrong = (labels != IGNORED) & ((said != labels) | sure.isnan())
    # Where nothing could be said, it is the least sure of the wrong ones.
    weight = torch.where(is_wrong, sure.nan_to_num(0.0), -1.0)
    place = weight.argmax(-1, keepdim=True)
    label = torch.where(is_wrong, labels, IGNORED).gather(-1, place)
    found = (label, said.gather(-1, place), sure.gather(-1, place), place)
    return torch.stack([each.squeeze(-1).float() for each in found])


def _table(
    labels: torch.Tensor, said: torch.Tensor, sure: torch.Tensor, num_classes: int
) -> torch.Tensor:
    """Return how often each class was taken for each; the last column: how often it was there."""
    known = torch.arange(num_classes, device=labels.device)
    true = (labels.reshape(-1, 1) == known).float()
    answer = (said.reshape(-1, 1) == known) & ~sure.isnan().reshape(-1, 1)
    there = torch.ones_like(answer[:, :1])
    # Products of ones and zeros are exact in every precision that a device multiplies in; their
    # sums are not, where a caller's autocast would make them bfloat16.
    with torch.autocast(labels.device.type, enabled=False):
        return (true.T @ torch.cat((answer, there), dim=1).float()).long()


def join(shares: Sequence[RankVerdicts | None]) -> RankVerdicts | None:
    """Return all ranks' verdicts as one, in the order of the evaluation; None where none agrees.

    Each round has a batch of every rank, the first rank's rows first.
    """
    found = [each for each in shares if each is not None]
    if not found or len({(each.kind, each.num_classes) for each in found}) > 1:
        return None
    num_rounds = max(len(each.sizes) for each in found)
    pieces, sizes = [], []
    samples: list[Any] = []
    knows = all(each.samples is not None for each in found)
    ends = [list(accumulate(each.sizes)) for each in found]
    for number in range(num_rounds):
        for each, upto in zip(found, ends, strict=True):
            if number < len(each.sizes):
                part = slice(upto[number] - each.sizes[number], upto[number])
                pieces.append(each.rows[:, part])
                samples.extend(each.samples[part] if knows and each.samples else ())
        sizes.append(sum(each.sizes[number] for each in found if number < len(each.sizes)))
    tables = [each.table for each in found if each.table is not None]
    supports = [each.supports for each in found if each.supports is not None]
    return RankVerdicts(
        found[0].kind,
        found[0].num_classes,
        np.concatenate(pieces, axis=1),
        tuple(sizes),
        tuple(samples) if knows else None,
        np.sum(tables, axis=0) if tables else None,
        np.sum(supports, axis=0) if supports else None,
        any(each.is_cut for each in found),
    )


def _samples(
    sizes: Sequence[int], samples_of: Callable[[int], Sequence[Any] | None]
) -> tuple[Any, ...]:
    found: list[Any] = []
    for number, size in enumerate(sizes):
        known = list(samples_of(number) or ())[:size]
        found += [*known, *[None] * (size - len(known))]
    return tuple(found)


def _first(value: Any) -> Any:
    """Return the scores, where a model gave more besides them."""
    return value[0] if isinstance(value, (list, tuple)) and value else value


def _only(labels: Any) -> Any:
    """Return the labels; of several kinds of labels none is what the scores are of."""
    is_one = isinstance(labels, (list, tuple)) and len(labels) == 1
    return labels[0] if is_one else labels


# -- figures of all samples -----------------------------------------------------------------------


def figures(shown: RankVerdicts, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of all verdicts; `names` are the classes' names, where they have some."""
    names = [str(name) for name in names[: shown.num_classes]]
    names += [str(number) for number in range(len(names), shown.num_classes)]
    if shown.kind == "regression":
        found = _values(shown)
    elif shown.kind == "tokens":
        found = _tokens(shown, names)
    else:
        found = _classes(shown, names)
    notes = found.pop("notes", [])
    if found["num_undecided"]:
        what = "Tokens" if shown.kind == "tokens" else "Samples"
        notes.append(
            f"{what} whose score is not a number count as wrong: {found['num_undecided']:,}."
        )
    if shown.is_cut:
        notes.append(f"Only the first {MOST_ROWS:,} samples of each process are counted.")
    return {**found, **({"note": " ".join(notes)} if notes else {})}


def store(folder: Path, split: str, content: dict[str, Any]) -> Path:
    """Write an evaluation's file, whole or not at all: `evaluation.json`, or with a set's name."""
    name = re.sub(r"[^\w.-]+", "_", split)
    if name != split:  # another set's name may have become the same
        name += f"-{hashlib.sha256(split.encode(errors='replace')).hexdigest()[:6]}"
    path = folder / evaluation_name(None if split == "eval" else name)
    folder.mkdir(parents=True, exist_ok=True)
    replace(path, to_json({"format": FORMAT, **content, "split": split}) + "\n")
    return path


# -- classes --------------------------------------------------------------------------------------


def _classes(shown: RankVerdicts, names: list[str]) -> dict[str, Any]:
    label, said = (_whole(shown.rows[row]) for row in (0, 1))
    places = np.flatnonzero((label >= 0) & (label < shown.num_classes))
    label, said, sure = label[places], said[places], shown.rows[2][places]
    is_known = ~np.isnan(sure)
    said = np.where(is_known, said, -1)
    confused = confusion(label, said, shown.num_classes, names)
    worst = [
        {
            "index": _index(shown, places[row]),
            "inputs": {},
            **_named(names, label[row], said[row], sure[row]),
        }
        for row in _most_confident(np.flatnonzero(label != said), sure)
    ]
    return {
        "kind": "classification",
        "num_samples": len(label),
        "num_undecided": int((~is_known).sum()),
        **confused,
        "worst": worst,
    }


def confusion(label: Array, said: Array, num_classes: int, names: Sequence[str]) -> dict[str, Any]:
    """Return who was taken for whom; what was said may be -1: nothing, and that is wrong.

    >>> found = confusion(np.array([0, 0, 1, 1]), np.array([0, 1, 1, -1]), 2, ["no", "yes"])
    >>> found["confusion"], found["per_class"][1]
    ([[1, 1], [0, 1]], {'precision': 0.5, 'recall': 0.5, 'f1': 0.5, 'support': 2})
    """
    support = np.bincount(label, minlength=num_classes)
    decided = said >= 0
    answers = np.bincount(said[decided], minlength=num_classes)
    right = np.bincount(label[label == said], minlength=num_classes)
    scores = _per_class(right, support, answers)
    if num_classes <= MOST_CLASSES:
        table = _counted(label[decided], said[decided], num_classes)
        return {"classes": list(names), "confusion": table.tolist(), "per_class": scores}
    mistakes = support + answers - 2 * right
    shown = np.sort(np.argsort(-mistakes, kind="stable")[:MOST_CONFUSED])
    place = np.full(num_classes, MOST_CONFUSED)
    place[shown] = np.arange(MOST_CONFUSED)
    table = _counted(place[label[decided]], place[said[decided]], MOST_CONFUSED + 1)
    rest = int(support.sum() - support[shown].sum())
    other = {"precision": None, "recall": None, "f1": None, "support": rest}
    return {
        "classes": [*(names[number] for number in shown), _OTHER],
        "confusion": table.tolist(),
        "per_class": [*(scores[number] for number in shown), other],
        "notes": [
            f"Of {num_classes:,} classes the {MOST_CONFUSED} with the most mistakes are shown; "
            f"{_OTHER!r} stands for all the others, right and wrong."
        ],
    }


def _tokens(shown: RankVerdicts, names: list[str]) -> dict[str, Any]:
    assert shown.table is not None and shown.supports is not None
    table, supports = shown.table, shown.supports
    label, said, where = (_whole(shown.rows[row]) for row in (0, 1, 3))
    sure = shown.rows[2]
    worst = [
        {
            "index": _index(shown, row),
            "inputs": {},
            "token": int(where[row]),
            **_named(names, label[row], said[row], sure[row]),
        }
        for row in _most_confident(np.flatnonzero(label >= 0), sure)
    ]
    return {
        "kind": "classification",
        "num_samples": shown.rows.shape[1],
        "num_tokens": int(supports.sum()),
        "num_undecided": int(supports.sum() - table.sum()),
        "classes": names,
        "confusion": table.tolist(),
        "per_class": _per_class(table.diagonal(), supports, table.sum(axis=0)),
        "worst": worst,
        "notes": ["Tokens are counted; of each sample, the most confidently wrong one is shown."],
    }


def _most_confident(wrong: Ints, sure: Array) -> Ints:
    order = np.argsort(-np.nan_to_num(sure[wrong], nan=-1.0), kind="stable")
    return wrong[order][:MOST_WORST]


def _named(names: Sequence[str], label: int, said: int, sure: float) -> dict[str, Any]:
    """Return what was true and what was said; where nothing could be, how sure is no number."""
    predicted = None if np.isnan(sure) else names[said]
    return {"label": names[label], "predicted": predicted, "confidence": _number(sure)}


def _per_class(right: Array, support: Array, answers: Array) -> list[dict[str, Any]]:
    scores = []
    for hits, true, said in zip(right.tolist(), support.tolist(), answers.tolist(), strict=True):
        scores.append(
            {
                "precision": _ratio(hits, said),
                "recall": _ratio(hits, true),
                "f1": _ratio(2 * hits, true + said),
                "support": true,
            }
        )
    return scores


def _counted(rows: Array, columns: Array, size: int) -> Ints:
    return np.bincount(rows * size + columns, minlength=size * size).reshape(size, size)


# -- values ---------------------------------------------------------------------------------------


def _values(shown: RankVerdicts) -> dict[str, Any]:
    true, said = shown.rows[0].astype(np.float64), shown.rows[1].astype(np.float64)
    error = said - true
    is_known = np.isfinite(error)
    known = np.flatnonzero(is_known)
    counts, edges = np.histogram(error[known], bins=_bins(error[known]))
    drawn = known[:: max(1, math.ceil(len(known) / _MOST_POINTS))]
    off = np.where(is_known, np.abs(error), -1.0)
    worst: list[dict[str, Any]] = [
        {
            "index": _index(shown, row),
            "inputs": {},
            "label": _number(true[row]),
            "predicted": _number(said[row]),
            "error": _number(error[row]),
        }
        for row in np.argsort(-off, kind="stable")[:MOST_WORST]
    ]
    return {
        "kind": "regression",
        "num_samples": len(true),
        "num_undecided": int((~is_known).sum()),
        "residuals": {"edges": [_number(e) for e in edges], "counts": counts.tolist()},
        "points": [[_number(true[row]), _number(said[row])] for row in drawn],
        "worst": worst,
    }


def _bins(error: Array) -> Array:
    """Return the edges of a histogram; errors that are all alike, or none, have a range too."""
    low, high = (float(error.min()), float(error.max())) if len(error) else (0.0, 0.0)
    if high - low <= 1e-6 * max(abs(low), abs(high), 1e-6):
        spread = max(abs(low) * 0.01, 1e-6)
        low, high = low - spread, high + spread
    return np.linspace(low, high, _NUM_BINS + 1)


# -- numbers --------------------------------------------------------------------------------------


def _whole(values: Array) -> Ints:
    return np.nan_to_num(values, nan=IGNORED).astype(np.int64)


def _index(shown: RankVerdicts, place: int) -> int | None:
    """Return where a sample is in its data set; None where the loader does not know it."""
    found = None if shown.samples is None else shown.samples[place]
    return int(found) if isinstance(found, (int, np.integer)) else None


def _number(value: Any) -> float | None:
    return float(f"{float(value):.7g}") if math.isfinite(value) else None


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0
