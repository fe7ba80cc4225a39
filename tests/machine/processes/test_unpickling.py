from __future__ import annotations

import io
import sys
import types

import cloudpickle

from anytrain.machine.processes import pickling
from anytrain.machine.processes.spawn import SpawnOptions, call


def made_here():
    class Net:
        calls: list[int] = []  # noqa: RUF012  what is shared is the matter

        def forward(self):
            return 1

    return Net


def test_a_class_that_comes_back_stays_this_process_own():
    net = made_here()
    calls, forward = net.calls, net.forward

    def work():
        net.calls.append(1)
        return net()

    back = call(work, (), SpawnOptions(1, 1, port=1))
    assert type(back) is net
    assert net.calls is calls
    assert net.forward is forward
    assert calls == []


def test_a_raised_errors_class_stays_this_process_own():
    class Mine(Exception):
        seen: list[int] = []  # noqa: RUF012

    seen = Mine.seen

    def work():
        Mine.seen.append(1)
        raise Mine("x")

    try:
        call(work, (), SpawnOptions(1, 1, port=1))
    except Mine as error:
        assert str(error) == "x"
    assert Mine.seen is seen
    assert seen == []


def test_functions_and_classes_by_value_settle_in_main(monkeypatch):
    main = types.ModuleType("__main__")
    code = "def helper(): pass\nclass Setting: value = 3\ndef f(): return helper, Setting"
    exec(code, vars(main))
    pickled = cloudpickle.dumps(main.f)
    fresh = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", fresh)
    unpickler = pickling.Unpickler(io.BytesIO(pickled))
    found = unpickler.load()
    unpickler.settle()
    assert fresh.f is found
    assert (fresh.helper, fresh.Setting) == found()
