"""Say what differs between runs, from their records alone: settings, code, curves and times.

Everything is told as plain values, which the terminal, the page and `--json` share.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anytrain.core import records
from anytrain.core.documents import mapping, real
from anytrain.core.errors import BadInput
from anytrain.insight.report import diff_curves, starts
from anytrain.insight.report.diff_curves import Curve, Divergence
from anytrain.insight.report.page_curves import is_clocked
from anytrain.insight.report.starts import flat
from anytrain.insight.report.why import training_seconds

if TYPE_CHECKING:
    from anytrain.core.records import RunRecord

# What names a place or a moment rather than a choice: two runs of one job differ in it.
_PLACES = frozenset({"output_dir", "logging_dir", "run_name", "hub_model_id", "project_dir"})
_NOT_CURVES = frozenset({"step", "epoch", "time", "event"})
_LOWER = ("loss", "error", "perplexity", "mse", "rmse", "mae", "wer", "cer")
_HIGHER = (
    "accuracy", "f1", "precision", "recall", "auc", "matthews_correlation", "pearson", "spearman",
    "spearmanr", "bleu", "rouge", "score", "reward", "acc", "mcc", "r2",
)  # fmt: skip
GROUPS = ("arguments", "model", "data", "code", "plan", "versions", "hardware", "place")


def open_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunRecord]:
    """Return the runs of the folders; refuse fewer than two, and a folder without a record."""
    if len(folders) < 2:
        raise BadInput(
            "There is nothing to compare with.",
            why=f"{len(folders)} run was given, and a difference takes two.",
            fix="pass two runs or more: `anytrain diff RUN_A RUN_B`.",
        )
    return [records.open_run(folder) for folder in folders]


def compare(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return what differs between the runs; the first one is what the others are held against."""
    facts = [_facts(run) for run in runs]
    labels = [label(n) for n in range(len(runs))]
    differences = [_difference(group, [each.get(group) for each in facts]) for group in GROUPS]
    histories = [curves(run) for run in runs]
    found = {
        "runs": [_about(run, name) for run, name in zip(runs, labels, strict=True)],
        "differences": differences,
        "notes": _notes(labels, facts, differences),
        "curves": _partings(histories, labels),
        "rule": diff_curves.RULE,
        "figures": _figures(runs, histories),
        "times": _times(runs),
    }
    found["is_same"] = _is_same(found, histories)
    return found


def label(place: int) -> str:
    """Return the letter of a run by its place: A to Z, then 27 and on.

    >>> label(0), label(26)
    ('A', '27')
    """
    return chr(ord("A") + place) if place < 26 else str(place + 1)


def curves(run: RunRecord) -> dict[str, dict[int, float]]:
    """Return each logged figure as values by step, but for those that are times themselves."""
    found: dict[str, dict[int, float]] = {}
    for entry in run.metrics:
        step = entry.get("step")
        if not isinstance(step, int):
            continue
        for name, value in entry.items():
            number = real(value)
            if name not in _NOT_CURVES and not is_clocked(name) and number is not None:
                found.setdefault(name, {})[step] = number
    return found


# -- what was chosen, and where -------------------------------------------------------------------


def _facts(run: RunRecord) -> dict[str, dict[str, Any] | None]:
    """Return what a run says of itself, by group; None for a group that it says nothing of."""
    start, began = run.start, run.life.began
    arguments = starts.arguments(start) or mapping(began.get("settings"))
    git = mapping(start.get("git"))
    code = {f"git {key}": value for key, value in git.items()}
    versions = mapping(start.get("versions")) or mapping(began.get("versions"))
    python: dict[str, Any] = {key: start[key] for key in ("python", "platform") if key in start}
    place = {key: value for key, value in arguments.items() if key in _PLACES}
    place |= {key: start[key] for key in ("command", "cwd", "host") if key in start}
    chosen = {key: value for key, value in arguments.items() if key not in _PLACES}
    found: dict[str, dict[str, Any]] = {
        "arguments": flat(chosen),
        "model": flat(mapping(start.get("model"))),
        "data": flat(mapping(start.get("data"))),
        "code": code,
        "plan": _plan(run, start),
        "versions": {**flat(versions), **python},
        "hardware": flat(mapping(start.get("hardware"))),
        "place": flat(place),
    }
    return {group: told or None for group, told in found.items()}


def _plan(run: RunRecord, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return each choice as (value, reason), as it stood at the end."""
    plan = mapping(start.get("plan"))
    found = {name: (mapping(c).get("value"), mapping(c).get("because")) for name, c in plan.items()}
    return found | {n: run.life.choice(n) for n in mapping(run.life.began.get("plan"))}


def _difference(group: str, told: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Return what differs of a group among the runs that speak of it, and how much doesn't."""
    known = [each for each in told if each is not None]
    names = dict.fromkeys(name for each in known for name in each)
    rows, same = [], 0
    for name in names:
        values = [None if each is None else each.get(name) for each in told]
        compared = [each.get(name) for each in known]
        if group == "plan":
            reasons = [None if value is None else value[1] for value in values]
            values, compared = _firsts(values), _firsts(compared)
            row = {"name": name, "values": values, "because": reasons}
        else:
            row = {"name": name, "values": values}
        if all(value == compared[0] for value in compared):
            same += 1
        else:
            rows.append(row)
    silent = [n for n, each in enumerate(told) if each is None]
    return {"group": group, "rows": rows, "same": same, "not_recorded": [label(n) for n in silent]}


def _firsts(values: Sequence[Any]) -> list[Any]:
    return [None if value is None else value[0] for value in values]


def _notes(
    labels: Sequence[str],
    facts: Sequence[dict[str, dict[str, Any] | None]],
    differences: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return what a reader must know to trust the rest."""
    found = []
    for each in differences:
        silent = each["not_recorded"]
        if silent and len(silent) < len(labels) and each["group"] != "code":
            one, several = _OF[each["group"]]
            found.append(
                f"{_listed(silent)} did not record {one if len(silent) == 1 else several}."
            )
    codes = [each.get("code") or {} for each in facts]
    without = [name for name, code in zip(labels, codes, strict=True) if not code]
    dirty = [name for name, code in zip(labels, codes, strict=True) if code.get("git is_dirty")]
    if without:
        found.append(
            f"{_listed(without)} recorded no git commit, so whether the code differs is unknown."
        )
    if dirty:
        found.append(
            f"{_listed(dirty)} ran with uncommitted changes, which are not recorded: the commit "
            "alone does not say what code ran."
        )
    return found


_OF = {
    **{group: (f"its {group}", f"their {group}") for group in GROUPS},
    "place": ("where it ran", "where they ran"),
}


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# -- what came of it ------------------------------------------------------------------------------


def _partings(
    histories: Sequence[Mapping[str, Curve]], labels: Sequence[str]
) -> list[dict[str, Any]]:
    """Return, for each figure of the first run, where each other run's curve parts from its."""
    first, *others = histories
    found = []
    for name, curve in first.items():
        partings: list[Divergence | None] = [
            diff_curves.part(curve, other[name], name) if name in other else None
            for other in others
        ]
        if max(len(curve), *(len(other.get(name, {})) for other in others)) < 2:
            continue  # one figure, such as a mean over the run, is no curve
        pairs = [
            {"run": who, "said": "not logged"} if one is None else {"run": who, **one.plain()}
            for who, one in zip(labels[1:], partings, strict=True)
        ]
        found.append({"name": name, "pairs": pairs})
    return found


def _figures(
    runs: Sequence[RunRecord], histories: Sequence[Mapping[str, Curve]]
) -> list[dict[str, Any]]:
    """Return the last and the best value of every figure in each run, side by side."""
    asked = [_asked_for(run) for run in runs]
    found = []
    for name in dict.fromkeys(name for history in histories for name in history):
        pick = _best_of(name, asked)
        kept = [history.get(name) for history in histories]
        last = [curve[max(curve)] if curve else None for curve in kept]
        if not any(last) and name == "total_flos":
            continue  # nobody counted
        best = [_best(curve, pick) for curve in kept]
        first = last[0]
        found.append(
            {
                "name": name,
                "last": last,
                "difference": [
                    None if value is None or first is None else value - first for value in last
                ],
                "best": best,
                "better": None if pick is None else "lower" if pick is min else "higher",
            }
        )
    return sorted(found, key=lambda each: not each["name"].startswith("eval"))


def _asked_for(run: RunRecord) -> tuple[str, bool] | None:
    arguments = mapping(run.start.get("arguments"))
    name, greater = arguments.get("metric_for_best_model"), arguments.get("greater_is_better")
    return (name, greater) if isinstance(name, str) and isinstance(greater, bool) else None


def _best_of(name: str, asked: Sequence[tuple[str, bool] | None]) -> Any:
    """Return `min` or `max`, or None where nobody can say which is better."""
    for each in asked:
        if each is not None and name in (each[0], f"eval_{each[0]}"):
            return max if each[1] else min
    words = name.replace("/", "_").replace("-", "_").lower().split("_")
    if any(word in _LOWER for word in words):
        return min
    return max if any(word in _HIGHER for word in words) else None


def _best(curve: Curve | None, pick: Any) -> float | None:
    finite = [value for value in (curve or {}).values() if math.isfinite(value)]
    return pick(finite) if finite and pick is not None else None


def _about(run: RunRecord, name: str) -> dict[str, Any]:
    last, began = run.life.last, run.life.began
    steps = [entry["step"] for entry in run.metrics if isinstance(entry.get("step"), int)]
    return {
        "label": name,
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "step": last.get("step", max(steps, default=None)),
        "max_steps": began.get("max_steps"),
        "starts": max(len(run.lives), len(run.starts)),
    }


def _times(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return times, throughput and memory, a row each; seconds of all starts together."""
    columns = [_spent(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [{"name": name, "values": [c.get(name) for c in columns]} for name in names]
    return [row for row in rows if any(value for value in row["values"])]


def _spent(run: RunRecord) -> dict[str, float | None]:
    life = run.total
    seconds, steps = life.seconds, life.num_steps
    going = training_seconds(life)
    per_step = real(life.began.get("samples_per_step"))
    return {
        "seconds": sum(seconds.values()) or None,
        "seconds per step": going / steps if steps else None,
        "samples per second": steps * per_step / going if per_step and going else None,
        "peak bytes": real(life.last.get("peak_bytes")) or None,
        **{f"seconds: {name}": spent for name, spent in seconds.items()},
    }


def _is_same(found: Mapping[str, Any], histories: Sequence[Mapping[str, Curve]]) -> bool:
    """Whether nothing that was recorded differs, but for places and times."""
    chosen = [each for each in found["differences"] if each["group"] != "place"]
    if any(each["rows"] or 0 < len(each["not_recorded"]) < len(histories) for each in chosen):
        return False
    if len({(run["state"], run["step"]) for run in found["runs"]}) > 1:
        return False
    # By their text, as NaN is not equal to itself.
    return all(repr(history) == repr(histories[0]) for history in histories)
