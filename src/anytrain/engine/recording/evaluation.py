"""Say what an evaluation showed: which classes were confused, how far values were off.

The figures are plain lists and numbers, as a file of JSON holds them. What is no number is None.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from anytrain.engine.objective import IGNORED
from anytrain.engine.recording.trackers.files import replace, to_json
from anytrain.engine.recording.verdicts import MOST_ROWS, Share

FORMAT = 1
Ints: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[Any]
MOST_CLASSES = 50
"""More classes than these are not shown one by one."""
MOST_CONFUSED = 20
MOST_WORST = 20
_MOST_POINTS = 1000
_NUM_BINS = 30
_OTHER = "other"


def figures(shown: Share, names: Sequence[str] = ()) -> dict[str, Any]:
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
    path = folder / ("evaluation.json" if split == "eval" else f"evaluation-{name}.json")
    folder.mkdir(parents=True, exist_ok=True)
    replace(path, to_json({"format": FORMAT, **content, "split": split}) + "\n")
    return path


# -- classes --------------------------------------------------------------------------------------


def _classes(shown: Share, names: list[str]) -> dict[str, Any]:
    label, said = (_whole(shown.rows[row]) for row in (0, 1))
    places = np.flatnonzero((label >= 0) & (label < shown.num_classes))
    label, said, sure = label[places], said[places], shown.rows[2][places]
    is_known = ~np.isnan(sure)
    said = np.where(is_known, said, -1)
    confused = confusion(label, said, shown.num_classes, names)
    wrong = np.flatnonzero(label != said)
    order = wrong[np.argsort(-np.nan_to_num(sure[wrong], nan=-1.0), kind="stable")][:MOST_WORST]
    worst = [
        {
            "index": _index(shown, places[row]),
            "inputs": {},
            "label": names[label[row]],
            "predicted": names[said[row]] if said[row] >= 0 else None,
            "confidence": _number(sure[row]),
        }
        for row in order
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


def _tokens(shown: Share, names: list[str]) -> dict[str, Any]:
    assert shown.table is not None and shown.supports is not None
    table, supports = shown.table, shown.supports
    label, said, where = (_whole(shown.rows[row]) for row in (0, 1, 3))
    sure = shown.rows[2]
    wrong = np.flatnonzero(label >= 0)
    order = wrong[np.argsort(-np.nan_to_num(sure[wrong], nan=-1.0), kind="stable")][:MOST_WORST]
    worst = [
        {
            "index": _index(shown, row),
            "inputs": {},
            "token": int(where[row]),
            "label": names[label[row]],
            "predicted": names[said[row]] if not np.isnan(sure[row]) else None,
            "confidence": _number(sure[row]),
        }
        for row in order
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


def _values(shown: Share) -> dict[str, Any]:
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


def _index(shown: Share, place: int) -> int | None:
    """Return where a sample is in its data set; None where the loader does not know it."""
    found = None if shown.samples is None else shown.samples[place]
    return int(found) if isinstance(found, (int, np.integer)) else None


def _number(value: Any) -> float | None:
    """Return a number with the digits that float32 has."""
    return float(f"{float(value):.7g}") if math.isfinite(value) else None


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0
