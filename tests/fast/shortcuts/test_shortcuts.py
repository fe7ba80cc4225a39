"""What becomes of a step's shortcuts; what they compute is tested on a GPU (tests/gpu)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from anytrain.fast.shortcuts.shortcuts import Shortening


class Told:
    """Shortcuts without kernels, which note what they are told."""

    problem = "no compiler"

    def __init__(
        self, *, are_there: bool = True, is_done: bool = True, puts_off: bool = False
    ) -> None:
        self.are_there, self.is_done, self._puts_off = are_there, is_done, puts_off
        self.heard: list[Any] = []

    def observed(self) -> Any:
        return nullcontext()

    def prepare(self, *, is_whole: bool) -> None:
        self.heard.append(("prepare", is_whole))

    def settle(self) -> None:
        self.heard.append("settle")

    def simplify(self) -> bool:
        could, self._puts_off = self._puts_off, False
        return could

    def clear(self) -> None:
        self.heard.append("clear")

    def forget(self) -> None:
        self.heard.append("forget")


class Guarded:
    """An optimizer whose guard counts how often it was told to forget."""

    def __init__(self) -> None:
        self.guard, self.num_forgotten = self, 0

    def forget(self) -> None:
        self.num_forgotten += 1


def shortening(told: Any, *optimizers: Any) -> Shortening:
    return Shortening(told, optimizers)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_recording_prepares_and_settles_the_shortcuts(is_whole: bool) -> None:
    told = Told()
    taken = shortening(told)
    assert taken.is_ready() and taken.taken is not None
    taken.prepare(is_whole=is_whole)
    taken.settle()
    assert told.heard == [("prepare", is_whole), "settle"]
    assert (taken.taken, taken.how()) == (told, "")


def test_what_recordings_read_from_is_let_go_of_with_them() -> None:
    told = Told()
    shortening(told).forget()
    shortening(None).forget()
    assert told.heard == ["forget"]


def test_a_recording_waits_for_the_compiler() -> None:
    assert not shortening(Told(is_done=False)).is_ready()


def test_kernels_that_are_not_there_leave_it_to_torch_and_say_why() -> None:
    told = Told(are_there=False)
    taken = shortening(told)
    taken.prepare(is_whole=True)
    taken.settle()
    assert taken.taken is None and not told.heard
    assert taken.how() == "by torch's own kernels alone: no compiler"


def test_a_recording_that_failed_is_worth_one_more_try_without_shortcuts() -> None:
    told, optimizers = Told(), (Guarded(), Guarded())
    taken = shortening(told, *optimizers)
    taken.clear()
    assert taken.reduce("a gradient of shape (3,)")
    assert told.heard == ["clear"] and taken.how().endswith("a gradient of shape (3,)")
    taken.clear()
    assert not taken.reduce("again")
    assert taken.how().endswith("a gradient of shape (3,)")
    assert [optimizer.num_forgotten for optimizer in optimizers] == [2, 2]


def test_without_shortcuts_there_is_nothing_to_wait_for_or_to_say() -> None:
    taken = shortening(None)
    assert taken.is_ready() and taken.taken is None
    with taken.observed():
        taken.prepare(is_whole=True)
    taken.settle()
    taken.end()
    assert taken.how() == ""


def test_what_is_put_off_is_given_up_first() -> None:
    told = Told(puts_off=True)
    taken = shortening(told)
    assert taken.reduce("first")
    assert (taken.taken, taken.how()) == (told, "")
    assert taken.reduce("second")
    assert taken.taken is None and taken.how().endswith("second")
    assert not taken.reduce("third")
    assert told.heard == []
