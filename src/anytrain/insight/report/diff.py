"""Say what differs between runs, from their records alone: settings, code, curves and times.

Everything is told as plain values, which the terminal, the page and `--json` share.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from anytrain.core import records
from anytrain.core.documents import mapping, real
from anytrain.core.errors import BadInput
from anytrain.insight.report import starts
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
RULE = (
    "Curves are compared at the steps that both runs logged. They part at the first of 4 shared "
    "points in a row that differ in one direction by more than twice their fluctuation (and by "
    "more than a millionth). The fluctuation is how much the two curves jump from point to point "
    "there: the median second difference of the 31 points around, as a standard deviation, of both "
    "together. How much a run would differ from its own repetition is another question: to see "
    "that, compare runs that differ in their seed alone. Of more than 400 shared points, means of "
    "neighbours are compared; from 100 on, the means of 25 stretches too, which show small "
    "differences that last. Fewer than 6 shared points show no fluctuation, and only the first "
    "difference is told. A value that is not finite in one run alone parts them at once. A figure "
    "that is set beforehand, such as the learning rate, does not fluctuate: it parts at its first "
    "difference. Of pairs that differ by chance alone, fewer than one in a hundred is said to part."
)
# Of 1,200 pairs of 100 to 1,000 points that differ by independent noise alone, this calls 3 apart;
# 3 in a row of 15 points around called 10 of 100.
_IN_A_ROW = 4
_TIMES = 2.0
_WINDOW = 15  # points on each side
_LEAST_POINTS = 6
# The more points are judged, the more often chance alone makes 4 in a row.
_MOST_POINTS = 400
_STRETCHES = 25
_POINTS_A_STRETCH = 4
_NEGLIGIBLE = 1e-6
# A second difference x[i-1] - 2 x[i] + x[i+1] of noise alone has the variance 1 + 4 + 1, and no
# slope in it; the median of a normal's size is 0.6745 of its deviation.
_TO_DEVIATION = 1 / (math.sqrt(6) * 0.6745)

_SET = re.compile(
    r"(?:.*[/_-])?(?:learning_rate|lr|weight_decay|momentum|total_flos|num_tokens"
    r"|num_input_tokens(?:_seen)?|epoch|global_step)(?:[/_-].*)?"
)

Curve = Mapping[int, float]


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
        "rule": RULE,
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
            part(curve, other[name], name) if name in other else None for other in others
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


# -- where two curves part: they differ by more than they jump about ------------------------------


@dataclass(frozen=True, slots=True)
class Divergence:
    """How two curves relate, at the steps that both logged."""

    num_shared: int
    """Steps that both logged."""
    same_until: int | None
    """The last shared step up to which all values are equal to the bit; None if the first isn't."""
    differ_from: int | None
    """The first shared step with another value; None if there is none."""
    parts_at: int | None
    """The first step beyond the fluctuation; None if there is none, or too few points to tell."""
    has_noise: bool
    """Whether there were points enough to measure the fluctuation."""
    differences: int = 0
    """Shared steps with another value."""
    is_set: bool = False
    """Whether the figure is set beforehand, and no chance is in it."""

    def line(self) -> str:
        """Return it in words.

        >>> part({1: 0.5, 2: 0.4}, {1: 0.5, 2: 0.4}).line()
        'equal to the bit at all 2 shared steps'
        """
        if not self.num_shared:
            return "no step that both logged"
        if self.is_set:
            return f"set beforehand: {self._of_what_is_set()}"
        if self.differ_from is None:
            return f"equal to the bit at {self._all()}"
        start = (
            f"differ from step {self.differ_from} on"
            if self.same_until is None
            else f"equal to the bit up to step {self.same_until}"
        )
        if self.parts_at is not None:
            return f"{start}, part at step {self.parts_at}"
        if not self.has_noise:
            few = (
                "1 shared step is"
                if self.num_shared == 1
                else f"{self.num_shared} shared steps are"
            )
            return f"{start}; {few} too few to say more"
        return f"{start}, by no more than they fluctuate"

    def _of_what_is_set(self) -> str:
        if self.parts_at is None:
            return f"the same at {self._all()}"
        return f"another from step {self.parts_at} on"

    def _all(self) -> str:
        return (
            "the one shared step" if self.num_shared == 1 else f"all {self.num_shared} shared steps"
        )

    def plain(self) -> dict[str, Any]:
        """Return it as plain values, with the words."""
        return {**asdict(self), "said": self.line()}


def is_set(name: str) -> bool:
    """Whether a figure is set beforehand or counted, so that no chance is in it.

    >>> is_set("learning_rate"), is_set("train/lr-head"), is_set("loss"), is_set("num_tokens")
    (True, True, False, True)
    """
    return _SET.fullmatch(name) is not None


def part(one: Curve, other: Curve, name: str = "") -> Divergence:
    """Return how two curves relate; each is a value by step, and `name` is the figure's."""
    steps = sorted(one.keys() & other.keys())
    pairs = [(one[step], other[step]) for step in steps]
    apart = [n for n, pair in enumerate(pairs) if _differ(pair)]
    first = apart[0] if apart else None
    if is_set(name):
        beyond = next((n for n, pair in enumerate(pairs) if _is_another(*pair)), None)
    else:
        beyond = None if first is None else _beyond(pairs, first)
    return Divergence(
        num_shared=len(steps),
        same_until=_before(steps, first),
        differ_from=None if first is None else steps[first],
        parts_at=None if beyond is None else steps[beyond],
        has_noise=len(steps) >= _LEAST_POINTS,
        differences=len(apart),
        is_set=is_set(name),
    )


def _before(steps: Sequence[int], first: int | None) -> int | None:
    if first is None:
        return steps[-1] if steps else None
    return steps[first - 1] if first else None


def _beyond(pairs: Sequence[tuple[float, float]], first: int) -> int | None:
    """Return the place of the first point beyond noise; what isn't finite counts at once."""
    odd = (n for n, pair in enumerate(pairs) if not all(map(math.isfinite, pair)) and _differ(pair))
    found = [next(odd, None)]
    if len(pairs) >= _LEAST_POINTS:
        found.append(_in_a_row(pairs, first, math.ceil(len(pairs) / _MOST_POINTS)))
    if len(pairs) >= _STRETCHES * _POINTS_A_STRETCH:
        found.append(_in_a_row(pairs, first, math.ceil(len(pairs) / _STRETCHES)))
    return min((place for place in found if place is not None), default=None)


def _in_a_row(pairs: Sequence[tuple[float, float]], first: int, size: int) -> int | None:
    """Return where means of so many neighbours begin to differ beyond that, and go on to."""
    groups = [_mean(pairs[start : start + size]) for start in range(0, len(pairs), size)]
    row: list[int] = []
    for n in range(first // size, len(groups)):
        row = [*row, _sign(*groups[n], _noise(groups, n))][-_IN_A_ROW:]
        if abs(sum(row)) == _IN_A_ROW:
            return max((n - _IN_A_ROW + 1) * size, first)
    return None


def _differ(pair: tuple[float, float]) -> bool:
    a, b = pair
    return a != b and not (math.isnan(a) and math.isnan(b))


def _is_another(a: float, b: float) -> bool:
    """Whether a value that is set is another one, and not the same one rounded otherwise."""
    return _differ((a, b)) and not abs(b - a) <= _NEGLIGIBLE * max(abs(a), abs(b))


def _mean(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(a for a, _ in pairs) / len(pairs), sum(b for _, b in pairs) / len(pairs)


def _sign(a: float, b: float, noise: float) -> int:
    """Return the direction of the difference, 0 where it is within noise."""
    bound = max(_TIMES * noise, _NEGLIGIBLE * max(abs(a), abs(b)))
    if not abs(b - a) > bound:  # so that NaN is no direction either
        return 0
    return 1 if b > a else -1


def _noise(pairs: Sequence[tuple[float, float]], n: int) -> float:
    """Return the deviation of the difference of two independent curves that jump as these do."""
    near = pairs[max(n - _WINDOW, 0) : n + _WINDOW + 1]
    return math.hypot(*(_deviation([pair[side] for pair in near]) for side in (0, 1)))


def _deviation(values: Sequence[float]) -> float:
    slopes = [after - before for before, after in pairwise(values)]
    bends = [abs(after - before) for before, after in pairwise(slopes)]
    finite = [bend for bend in bends if math.isfinite(bend)]
    return median(finite) * _TO_DEVIATION if finite else 0.0
