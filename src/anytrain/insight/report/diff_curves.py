"""Find where two curves part: the first step at which they differ by more than they jump about."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

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
