"""What a process does with the signals that it gets, one by one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from anytrain.engine import interrupts
from anytrain.engine.interrupts import Interrupted, Interrupts
from anytrain.machine.parallel.world import Solo


class Told(Exception):
    """What a script's own handler raises."""


@pytest.fixture
def made() -> Iterator[Interrupts]:
    def tell(number: int, frame: Any) -> None:
        raise Told

    before = {n: signal.signal(n, tell) for n in (signal.SIGTERM, signal.SIGINT)}
    saved: list[str] = []

    def save() -> str:
        saved.append("saved")
        return "saved."

    armed = Interrupts(Solo(), save, lambda: True)
    armed.arm()
    yield armed
    armed.disarm()
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_an_interrupt_that_comes_twice_within_a_moment_is_one(
    made: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_ONE_WISH_S", 200.0)  # a busy machine may come between
    send(signal.SIGINT)
    send(signal.SIGINT)
    with pytest.raises(Interrupted):
        made.boundary()


def test_a_script_that_has_only_imported_ipykernel_is_no_notebook(made: Interrupts) -> None:
    pytest.importorskip("ipykernel")
    send(signal.SIGINT)
    with pytest.raises(Interrupted):
        made.boundary()


def test_an_interrupt_that_comes_again_later_ends_at_once(made: Interrupts) -> None:
    send(signal.SIGINT)
    time.sleep(0.55)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_signal_that_no_boundary_saw_comes_again_when_handed_back(made: Interrupts) -> None:
    send(signal.SIGTERM)
    with pytest.raises(Told):
        made.hand_back()


def test_a_signal_that_was_answered_does_not_come_again(made: Interrupts) -> None:
    send(signal.SIGTERM)
    with pytest.raises(Interrupted):
        made.boundary()
    made.hand_back()


def test_nothing_comes_where_nothing_came(made: Interrupts) -> None:
    made.hand_back()
    with pytest.raises(Told):
        send(signal.SIGTERM)


def test_a_signal_that_is_ignored_stays_ignored(made: Interrupts) -> None:
    made.disarm()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    made.arm()
    send(signal.SIGINT)
    made.boundary()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    made.disarm()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_interrupt_after_the_save_lets_the_process_leave_in_peace(
    made: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_LEAVING_S", 200.0)  # a busy machine may come between
    send(signal.SIGINT)
    with pytest.raises(Interrupted):
        made.boundary()
    for number in (signal.SIGINT, signal.SIGTERM):
        send(number)
    made.disarm()
    with pytest.raises(Told):
        send(signal.SIGINT)


def test_a_process_that_takes_long_to_leave_can_be_interrupted(
    made: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_LEAVING_S", 0.0)
    send(signal.SIGINT)
    with pytest.raises(Interrupted):
        made.boundary()
    with pytest.raises(Told):
        send(signal.SIGINT)
