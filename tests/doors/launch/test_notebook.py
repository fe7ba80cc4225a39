from __future__ import annotations

import inspect
import os
import socket
import sys
import threading
import time
import types

import pytest

import anytrain
from anytrain.core.errors import BadInput, BadType, Notice, Unsupported, WrongOrder
from anytrain.doors.launch import debug_launcher, notebook_launcher
from launching import free_port, run_script


def test_the_signatures_are_those_people_know():
    accelerate = pytest.importorskip("accelerate")
    for ours in (notebook_launcher, debug_launcher):
        theirs = getattr(accelerate, ours.__name__)
        known = {n: p.default for n, p in inspect.signature(theirs).parameters.items()}
        found = {n: p.default for n, p in inspect.signature(ours).parameters.items()}
        # Ours come last: arguments given by position mean what they meant.
        assert list(found)[: len(known)] == list(known)
        assert {name: found[name] for name in known} == known
    assert anytrain.notebook_launcher is notebook_launcher


def test_the_launchers_are_imported_without_torch():
    run_script(
        "from anytrain import notebook_launcher; import sys; assert 'torch' not in sys.modules",
        fresh=True,
    )


def test_one_process_is_this_one(monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    assert notebook_launcher(os.getpid, num_processes=1) == os.getpid()
    assert notebook_launcher(os.getpid) == os.getpid()


def test_one_process_is_told_its_precision_for_the_time_of_the_call(monkeypatch):
    from anytrain.core import environment

    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")

    def precision():
        wish = environment.read().wishes.precision
        return wish and wish.value

    assert notebook_launcher(precision, num_processes=1, mixed_precision="bf16") == "bf16"
    assert precision() is None
    monkeypatch.setenv("ANYTRAIN_MIXED_PRECISION", "bf16")
    assert notebook_launcher(precision, num_processes=1) == "bf16"


def test_several_processes_form_a_world(monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")

    def work(offset):
        import torch

        from anytrain.core import environment
        from anytrain.machine.parallel import torch_dist

        env = environment.read()
        world = torch_dist.join(env.place, "gloo", torch.device("cpu"), beats=env.beats)
        value = world.reduce(torch.tensor(world.rank + offset), "sum").item()
        return value, env.wishes.precision.value

    port = str(free_port())
    words = {"num_processes": 2, "mixed_precision": "bf16", "use_port": port}
    assert notebook_launcher(work, (10,), **words) == (21, "bf16")


def test_the_debug_launcher_takes_the_cpu():
    def device():
        import os

        from anytrain.core import environment

        return environment.read().wishes.device.value, os.environ["WORLD_SIZE"]

    assert debug_launcher(device) == ("cpu", "2")


def test_a_function_of_the_running_script_works():
    script = """
    from anytrain import debug_launcher

    class Setting:
        value = 20

    def helper():
        return Setting.value

    def train(more):
        return helper() + more

    if __name__ == "__main__":
        print(debug_launcher(train, (2,)))
    """
    assert run_script(script).stdout == "22\n"


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_processes": 0},
        {"mixed_precision": "fp12"},
        {"node_rank": 1},
        {"num_processes": 2, "use_port": "many"},
        {"num_processes": 2, "start_method": "forkserver"},
        {"num_processes": 2, "start_method": "threads"},
        {"num_processes": 2, "timeout": 0},
        {"num_processes": 2, "downcast_bf16": True},
        {"num_processes": 2.0},
        {"num_processes": 2, "use_port": 65536},
        {"num_processes": 2, "use_port": -1},
        {"num_processes": 2, "use_port": 0, "num_nodes": 2},
        {"num_processes": 2, "rdzv_endpoint": "localhost"},
        {"num_processes": 2, "timeout": float("nan")},
        {"num_processes": 2, "timeout": "a"},
        {"num_processes": "2"},
        {"num_processes": 2, "max_restarts": "1"},
        {"mixed_precision": 3},
        {"num_processes": 2, "max_restarts": -1},
        {"num_processes": 2, "monitor_interval": 0},
    ],
)
def test_what_cannot_work_is_refused(wrong, monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    with pytest.raises(BadInput):
        notebook_launcher(print, **wrong)


def test_what_a_function_returned_is_no_function(monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    with pytest.raises(BadType, match="Cannot call a tuple") as caught:
        notebook_launcher((1, 2), num_processes=2)
    assert "without parentheses" in caught.value.fix


BEFORE = """
    import torch
    from torch.utils.data import DataLoader
    from anytrain import Accelerator, notebook_launcher

    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=1)
    made = accelerator.prepare(net, optimizer, loader)

    def look():
        return accelerator.process_index, accelerator.is_main_process

    def train(own, model, optimizer, loader):
        batches = list(loader)
        for batch in batches:
            own.backward(model(batch).mean())
            optimizer.step()
        return len(batches)

    def as_they_are():
        return train(Accelerator(cpu=True), *made)

    def anew():
        own = Accelerator(cpu=True)
        return train(own, *own.prepare(*made))

    if __name__ == "__main__":
        for function in (look, as_they_are, anew):
            try:
                print(notebook_launcher(function, num_processes=2, return_all=True))
            except Exception as error:
                print(type(error).__name__, error.fix)
"""


def test_an_accelerator_of_the_notebook_is_not_used_in_its_processes():
    first, second, third = run_script(BEFORE).stdout.splitlines()
    for told in (first, second):
        assert told.startswith("WrongOrder make the Accelerator inside the function")
    assert third == "[4, 4]"


def test_tensors_that_differ_between_the_ranks_are_told_as_the_cause():
    script = """
    import torch
    from anytrain import Accelerator, debug_launcher

    def gather():
        accelerator = Accelerator(cpu=True)
        return accelerator.gather(torch.ones(1 + accelerator.process_index))

    if __name__ == "__main__":
        try:
            debug_launcher(gather)
        except Exception as error:
            print(error.why, error.fix)
    """
    told = run_script(script).stdout
    assert "in gather the ranks' tensors must be alike in shape and dtype" in told
    assert "pad_across_processes" in told


@pytest.mark.parametrize("args", [None, "abc", 3], ids=repr)
def test_arguments_without_their_comma_are_refused(args):
    for launcher in (notebook_launcher, debug_launcher):
        with pytest.raises(BadType, match="Cannot use a") as caught:
            launcher(print, args, num_processes=2)
        assert "(model,)" in caught.value.fix


def test_no_precision_is_the_default_one_and_arguments_may_be_a_list(monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    assert notebook_launcher(max, [1, 2], num_processes=1, mixed_precision=None) == 2


def test_what_a_rendezvous_service_would_read_is_said_to_change_nothing(monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    with pytest.warns(Notice, match="change nothing"):
        notebook_launcher(int, num_processes=1, rdzv_conf={"timeout": 1})


def test_the_default_port_need_not_be_free_and_launches_may_run_side_by_side(monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")

    def port():
        import os

        return os.environ["MASTER_PORT"]

    def launch():
        found.append(notebook_launcher(port, num_processes=2))

    found = []
    threads = [threading.Thread(target=launch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 2
    assert "29500" not in found


def test_a_second_launch_on_a_given_port_is_refused_and_the_first_goes_on(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    port, flag = free_port(), str(tmp_path / "over")

    def wait():
        import os
        import time

        open(flag + "-not-yet", "w").close()
        while not os.path.exists(flag):
            time.sleep(0.02)
        return "done"

    def launch():
        found.append(notebook_launcher(wait, num_processes=2, use_port=port, timeout=240))

    found = []
    first = threading.Thread(target=launch)
    first.start()
    while not os.path.exists(flag + "-not-yet"):
        assert first.is_alive()
        time.sleep(0.02)
    with pytest.raises(BadInput, match=f"port {port}") as caught:
        notebook_launcher(print, num_processes=2, use_port=port)
    assert "another launch" in caught.value.why
    (tmp_path / "over").touch()
    first.join()
    assert found == ["done"]


def test_another_rendezvous_is_refused_by_name():
    with pytest.raises(Unsupported, match="c10d"):
        notebook_launcher(print, num_processes=2, num_nodes=2, rdzv_backend="c10d")


def test_a_port_in_use_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port}") as caught:
            notebook_launcher(print, num_processes=2, use_port=port)
    assert "use_port" in caught.value.fix


def test_one_process_is_a_child_where_a_start_method_or_a_timeout_asks_for_it(monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    for words in ({"start_method": "spawn"}, {"timeout": 60}):
        assert notebook_launcher(os.getpid, num_processes=1, **words) != os.getpid()
    assert notebook_launcher(os.getpid, num_processes=1, return_all=True) == [os.getpid()]


@pytest.mark.parametrize("leave", [sys.exit, os._exit])
def test_a_function_that_leaves_instead_of_returning_is_told(leave, monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    with pytest.warns(Notice, match="did not return in rank 0: .* exit code 0"):
        assert notebook_launcher(leave, (0,), num_processes=1, start_method="spawn") is None


def test_a_launch_inside_a_launch_is_refused():
    def again():
        from anytrain import debug_launcher

        return debug_launcher(print)

    with pytest.raises(WrongOrder, match="Cannot launch processes from a process") as caught:
        debug_launcher(again)
    assert "of 2" in caught.value.why


def test_a_fork_is_refused_where_a_run_lives_here(monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    import torch

    from anytrain import Accelerator

    torch.set_num_threads(1)
    Accelerator(cpu=True)
    with pytest.raises(WrongOrder, match="Cannot fork") as caught:
        notebook_launcher(print, num_processes=2, start_method="fork")
    assert "Accelerator" in caught.value.why


def test_a_fork_is_refused_after_torch_xla_was_imported(monkeypatch):
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    monkeypatch.setitem(sys.modules, "torch_xla", types.ModuleType("torch_xla"))
    with pytest.raises(WrongOrder, match="Cannot fork") as caught:
        notebook_launcher(print, num_processes=2, start_method="fork")
    assert "torch_xla has been imported here" in caught.value.why


def test_a_fork_tells_that_threads_stay_behind(monkeypatch):
    import torch

    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with pytest.warns(Notice, match="one thread each"):
        notebook_launcher(int, num_processes=2, start_method="fork", use_port=0)
