"""Where two curves part: beyond their own noise, and no sooner."""

from __future__ import annotations

import math
import random

import pytest

from anytrain.insight.report.diff import part


def noisy(seed: int, num_steps: int = 300, drift_from: int | None = None) -> dict[int, float]:
    """Return a curve that falls and jumps about, and from a step on drifts up."""
    chance = random.Random(seed)
    curve = {step: 2 / (1 + step / 50) + chance.gauss(0, 0.1) for step in range(num_steps)}
    if drift_from is not None:
        curve = {s: v + 0.005 * max(s - drift_from, 0) for s, v in curve.items()}
    return curve


def test_equal_curves_are_equal_to_the_bit() -> None:
    found = part(noisy(0), noisy(0))
    assert found.differ_from is found.parts_at is None
    assert (found.same_until, found.num_shared) == (299, 300)
    assert found.line() == "equal to the bit at all 300 shared steps"


def test_noise_alone_parts_one_pair_of_curves_in_a_hundred_at_most() -> None:
    found = [part(noisy(seed), noisy(1000 + seed)) for seed in range(100)]
    assert sum(each.parts_at is not None for each in found) <= 1
    assert all(each.differ_from == 0 and each.same_until is None for each in found)


def test_a_drift_is_found_once_it_is_beyond_the_noise() -> None:
    places = [part(noisy(s), noisy(1000 + s, drift_from=100)).parts_at for s in range(50)]
    assert all(place is not None and 50 < place < 230 for place in places)


def test_a_small_difference_that_lasts_is_found_in_much_noise() -> None:
    higher = {step: value + 0.08 for step, value in noisy(1005, 1000).items()}
    found = part(noisy(5, 1000), higher).parts_at  # less than the noise of a point
    assert found is not None and found < 100


def test_the_noise_of_a_very_long_run_parts_no_curves_either() -> None:
    found = part(noisy(1, 50_000), noisy(2, 50_000))
    assert found.parts_at is None


def test_curves_that_were_one_part_where_they_leave_each_other() -> None:
    one = noisy(3)
    other = {step: value + (1.0 if step >= 200 else 0.0) for step, value in one.items()}
    found = part(one, other)
    assert (found.same_until, found.differ_from, found.parts_at) == (199, 200, 200)
    assert found.line() == "equal to the bit up to step 199, part at step 200"


def test_a_rounding_error_is_no_parting() -> None:
    one = dict.fromkeys(range(50), 0.5)
    other = dict.fromkeys(range(50), 0.5 * (1 + 1e-12))
    found = part(one, other)
    assert (found.differ_from, found.parts_at) == (0, None)


def test_smooth_curves_part_at_once() -> None:
    one = {step: 1 - step / 100 for step in range(50)}
    other = {step: value if step < 20 else value * 0.9 for step, value in one.items()}
    assert part(one, other).parts_at == 20


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_value_that_is_not_finite_in_one_run_parts_at_once(odd: float) -> None:
    one = noisy(4)
    assert part(one, {**one, 77: odd}).parts_at == 77
    assert part({0: 1.0, 1: 2.0}, {0: 1.0, 1: odd}).parts_at == 1
    assert part({**one, 77: odd}, {**one, 77: odd}).differ_from is None


def test_few_points_tell_a_difference_and_no_more() -> None:
    found = part({1: 0.5, 2: 0.4, 3: 0.3}, {1: 0.5, 2: 0.9, 3: 0.8})
    assert (found.same_until, found.differ_from, found.parts_at) == (1, 2, None)
    assert found.line() == "equal to the bit up to step 1; 3 shared steps are too few to say more"
    assert part({1: 0.5}, {1: 0.6}).line().endswith("; 1 shared step is too few to say more")
    assert part({1: 0.5}, {1: 0.5}).line() == "equal to the bit at the one shared step"


def test_a_value_that_is_set_parts_at_its_first_difference_but_for_rounding() -> None:
    one = {step: 1e-3 / (1 + step) for step in range(50)}
    rounded = {step: value * (1 + 1e-12) for step, value in one.items()}
    assert part(one, rounded, "learning_rate").line() == (
        "set beforehand: the same at all 50 shared steps"
    )
    warmer = {step: value * (2 if step == 7 else 1) for step, value in one.items()}
    assert part(one, warmer, "learning_rate").parts_at == 7
    assert part(one, warmer, "loss").parts_at is None


def test_only_steps_that_both_logged_are_compared() -> None:
    found = part({1: 1.0, 10: 0.5, 20: 0.2}, {10: 0.5, 15: 9.0})
    assert (found.num_shared, found.differ_from) == (1, None)
    assert part({1: 1.0}, {2: 1.0}).line() == "no step that both logged"
