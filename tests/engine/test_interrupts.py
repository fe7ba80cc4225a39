"""What a process does with the signals that it gets, one by one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from anytrain.engine.interrupts import Interrupted, Interrupts
from anytrain.machine.parallel.world import Solo
from launching import run_command


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


TWICE = """
import os, signal
from anytrain.engine.interrupts import Interrupted, Interrupts
from anytrain.machine.parallel.world import Solo

armed = Interrupts(Solo(), lambda: "saved.", lambda: True)
armed.arm()
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGINT)
try:
    armed.boundary()
except Interrupted:
    print("one")
"""


def test_an_interrupt_that_comes_twice_within_a_moment_is_one() -> None:
    assert run_command([sys.executable, "-c", TWICE]).stdout.splitlines()[-1] == "one"


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
