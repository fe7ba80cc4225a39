"""The time ledger: every second is somebody's, and nobody's twice."""

from __future__ import annotations

import pickle
import timeit
from collections.abc import Callable

import pytest

from anytrain.core import clock
from anytrain.core.clock import OUTSIDE, Ledger


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let so many seconds pass, on a clock moved by hand."""
    now = [0]

    def move(seconds: int) -> None:
        now[0] += seconds

    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])
    return move


def test_seconds_add_up_to_the_wall_time(passes: Callable[[int], None]) -> None:
    ledger = Ledger()
    passes(1)
    for _ in range(2):
        with ledger.span("data"):
            passes(2)
        ledger.rest("other")
        passes(3)
        with ledger.span("step"):
            passes(4)
    assert ledger.totals() == {"start": 1, "data": 4, "step": 8, "other": 6}
    assert list(ledger.totals()) == ["start", "data", "step", "other"]
    assert sum(ledger.shares().values()) == pytest.approx(1)
    passes(1)
    assert ledger.totals()["other"] == 7, "what is outside any span is the rest"


def test_the_running_span_is_counted_up_to_now(passes: Callable[[int], None]) -> None:
    ledger = Ledger()
    with ledger.span("step"):
        passes(5)
        assert ledger.totals()["step"] == 5
        passes(1)
    assert ledger.totals()["step"] == 6


def test_a_span_inside_another_takes_its_time_off_it(passes: Callable[[int], None]) -> None:
    ledger = Ledger()
    with ledger.span("step"):
        passes(1)
        with ledger.span("record"):
            passes(30)
        passes(1)
    assert ledger.totals() == {"step": 2, "record": 30}


def test_what_happens_in_an_evaluation_or_a_save_is_theirs(passes: Callable[[int], None]) -> None:
    ledger = Ledger()
    with ledger.span("evaluate"):
        with ledger.span("data"):
            passes(1)
            with ledger.span("transfer"):
                passes(2)
        ledger.hide("data")
        passes(3)
    assert ledger.totals() == {"data": 0, "transfer": 0, "evaluate": 6}
    assert ledger.hidden == 0


def test_an_error_inside_a_span_ends_it(passes: Callable[[int], None]) -> None:
    ledger = Ledger()
    with pytest.raises(KeyError), ledger.span("step"), ledger.span("wait"):
        passes(1)
        raise KeyError
    passes(2)
    assert ledger.totals() == {"start": 2, "step": 0, "wait": 1}


def test_a_wait_behind_a_busy_device_is_the_steps_time(passes: Callable[[int], None]) -> None:
    ledger = Ledger()
    for seconds in (1, 20):
        with ledger.span("data"):
            passes(seconds)
    ledger.hide("data")
    ledger.hide("data")  # once is enough
    assert ledger.totals() == {"data": 1, "step": 20}
    assert ledger.hidden == 20


def test_a_loop_of_the_users_own_steps_between_batches_and_evaluates_where_nothing_moves(
    passes: Callable[[int], None],
) -> None:
    ledger = Ledger()
    passes(1)
    training = ledger.enter_walk(updates=0)
    passes(10)
    testing = ledger.enter_walk(updates=3)  # an evaluation in the middle of an epoch
    with ledger.span("data"):
        passes(5)
    passes(20)
    ledger.leave_walk(testing, updates=3)
    passes(10)
    ledger.leave_walk(training, updates=4)
    passes(2)
    assert ledger.totals() == {"start": 1, "data": 5, "step": 20, "evaluate": 20, "other": 2}


def test_two_loaders_side_by_side_end_in_any_order(passes: Callable[[int], None]) -> None:
    ledger = Ledger()
    first, second = ledger.enter_walk(updates=0), ledger.enter_walk(updates=0)
    passes(10)
    ledger.leave_walk(first, updates=3)
    passes(1)
    ledger.leave_walk(second, updates=3)
    passes(2)
    assert ledger.totals() == {"step": 11, "other": 2}


def test_an_evaluation_before_the_first_update_is_one_once_there_are_updates(
    passes: Callable[[int], None],
) -> None:
    ledger = Ledger()
    one, two = ledger.enter_walk(updates=0), ledger.enter_walk(updates=0)
    passes(5)
    ledger.leave_walk(one, updates=0)
    ledger.leave_walk(two, updates=0)
    assert ledger.totals()["step"] == 5, "a loop may update what nobody sees here"
    training = ledger.enter_walk(updates=0)
    passes(10)
    ledger.leave_walk(training, updates=3)
    totals = ledger.totals()
    assert (totals["step"], totals["evaluate"]) == (10, 5)


def test_a_loop_that_names_its_parts_is_left_alone(passes: Callable[[int], None]) -> None:
    ledger = Ledger()
    ledger.own_loop = False
    ledger.rest("other")
    walk = ledger.enter_walk(updates=0)
    passes(3)
    ledger.leave_walk(walk, updates=0)
    assert ledger.totals() == {"other": 3}


def test_a_second_run_begins_with_nothing(passes: Callable[[int], None]) -> None:
    ledger = Ledger()
    ledger.begin()
    with ledger.span("step"):
        passes(1)
    ledger.rest(OUTSIDE)
    passes(10)
    assert OUTSIDE not in ledger.totals(), "the time between two trainings is in no share"
    ledger.begin()
    passes(2)
    assert ledger.totals() == {"start": 2}


def test_a_copy_begins_its_own_time() -> None:
    ledger = Ledger()
    with ledger.span("step"):
        pass
    assert "step" not in pickle.loads(pickle.dumps(ledger)).totals()


def test_a_span_costs_little() -> None:
    ledger = Ledger()
    span = ledger.span("step")

    def used() -> None:
        with span:
            pass

    cost = min(timeit.repeat(used, number=2_000, repeat=5)) / 2_000
    assert cost < 10e-6, "it takes 0.6 us on an idle machine"
