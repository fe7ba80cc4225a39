from __future__ import annotations

import threading
import time
import traceback

import pytest

from anytrain.core.errors import BadInput
from anytrain.machine.processes import exceptions, notes


class TwoWords(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code


class Holding(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock, self.size = threading.Lock(), 3


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


class OwnWay(Exception):
    def __init__(self, *, name):
        super().__init__(f"no column {name}")
        self.name = name

    def __reduce__(self):
        return _own_way, (self.name,)


def _own_way(name):
    return OwnWay(name=name)


class NoFile(OSError):
    def __init__(self, path):
        super().__init__(2, "No such file", path)


def told(error):
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001  all kinds are told
        return exceptions.unpickle_error(exceptions.pickle_error(raised))


@pytest.mark.parametrize(
    "error",
    [
        TwoWords(7, "seven"),
        Holding("held"),
        OwnWay(name="label"),
        NoFile("/x"),
        KeyError("a"),
        StopIteration(3),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ImportError("no", name="torch_tpu"),
        BadInput("What.", why="because.", fix="mend it."),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_every_error_keeps_its_class_and_its_words(error):
    again = told(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    for name in ("code", "size", "name", "filename", "value", "reason"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_an_error_whose_text_fails_is_told_all_the_same():
    assert type(told(Mute("x"))) is Mute
    assert notes.words(Mute("x")) == "Mute: (its text cannot be shown: ValueError)"


def test_an_error_whose_text_would_change_is_told_in_words():
    class Counting(Exception):
        def __str__(self):
            return str(self.lock)

    error = Counting()
    error.lock = threading.Lock()
    again = told(error)
    assert type(again) is RuntimeError
    assert str(again).startswith("Counting: <unlocked")


def test_notes_come_along():
    error = BadInput("What.", why="because.", fix="mend it.")
    error.add_note("a hint")
    assert told(error).__notes__ == ["a hint"]


def test_a_long_chain_of_errors_costs_no_more_than_its_length():
    def fail(depth):
        if depth == 0:
            raise ValueError("root")
        try:
            fail(depth - 1)
        except Exception as error:
            raise RuntimeError(f"level {depth}") from error

    with pytest.raises(RuntimeError) as caught:
        fail(60)
    begun = time.monotonic()
    again = exceptions.unpickle_error(exceptions.pickle_error(caught.value))
    assert time.monotonic() - begun < 240
    depth = 0
    while again.__cause__ is not None:
        assert again.__context__ is again.__cause__
        again, depth = again.__cause__, depth + 1
    assert (depth, str(again)) == (60, "root")


def test_the_members_of_a_group_keep_their_lines():
    def inner():
        raise KeyError("deep")

    with pytest.raises(KeyError) as caught:
        inner()
    again = told(ExceptionGroup("several", [caught.value, ValueError("flat")]))
    assert [type(member) for member in again.exceptions] == [KeyError, ValueError]
    assert "in inner" in "".join(traceback.format_exception(again))
