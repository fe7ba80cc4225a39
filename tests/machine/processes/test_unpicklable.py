from __future__ import annotations

import multiprocessing
import threading

import pytest

from anytrain.core.errors import BadType
from anytrain.machine.processes.spawn import SpawnOptions, call, pack

lock = threading.Lock()


class Rows:
    def __init__(self):
        self.path = "rows.txt"
        self.lines = (line for line in ("a", "b"))


class Loader:
    def __init__(self):
        self.dataset = Rows()


def refusal(function, *args):
    with pytest.raises(BadType, match="Cannot hand") as caught:
        pack(function, args)
    return caught.value.why


def test_an_argument_is_named_with_the_way_to_what_is_to_blame():
    def train(model, loader):
        pass

    assert "the argument `loader.dataset.lines` (a generator)" in refusal(train, 1, Loader())
    assert "the argument `args[0][1]['key']`" in refusal(print, [1, {"key": lock}])


def test_a_variable_of_the_function_is_named():
    guard = {"inner": lock}

    def train():
        return guard

    assert "the variable `guard['inner']` (a _thread.lock)" in refusal(train)


def test_a_variable_of_a_function_that_the_function_calls_is_named():
    mine = threading.Lock()

    def inner():
        return mine

    def train():
        return [inner() for _ in range(2)]

    assert "the variable `mine`" in refusal(train)


def test_what_cannot_come_back_is_named_too():
    def work():
        import threading

        return {"held": [threading.Lock()]}

    with pytest.raises(BadType, match="Cannot bring back") as caught:
        call(work, (), SpawnOptions(1, 1, port=1))
    assert "`value['held'][0]` (a _thread.lock)" in caught.value.why


def test_a_queue_is_named_and_not_its_semaphores():
    queue = multiprocessing.get_context("fork").Queue()
    with pytest.raises(BadType) as caught:
        pack(lambda q: q, (queue,))
    assert "the argument `q` (a multiprocessing.queues.Queue)" in caught.value.why
    assert "fork" in caught.value.fix
