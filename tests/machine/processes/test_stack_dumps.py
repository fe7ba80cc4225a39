"""What a process leaves behind of its stack, with real processes that end in real ways."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import timeit

import pytest

from anytrain.machine.processes import stack_dumps
from anytrain.machine.processes.stack_dumps import Frame
from launching import child_environment, run_script

CHILD = """
import ctypes, os, signal, sys, threading, time
from anytrain.machine.processes import stack_dumps
{first}
stack_dumps.dump_stacks(sys.argv[1], 3)

def hurt():
    {how}

def train():
    hurt()

train()
"""


def die(folder, how, first=""):
    """Run a child that ends by `how`; return it."""
    script = folder / "child.py"
    script.write_text(CHILD.format(how=how, first=first))
    command = [sys.executable, str(script), str(folder)]
    ran = subprocess.Popen(command, env=child_environment(), stderr=subprocess.PIPE, text=True)
    ran.stderr_text = ran.communicate(timeout=240)[1]
    return ran


@pytest.mark.parametrize(
    ("how", "signum"),
    [
        ("ctypes.string_at(0)", signal.SIGSEGV),
        ("os.abort()", signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGBUS)", signal.SIGBUS),
        ("os.kill(os.getpid(), signal.SIGFPE)", signal.SIGFPE),
        ("os.kill(os.getpid(), signal.SIGILL)", signal.SIGILL),
    ],
)
def test_a_native_crash_leaves_its_stack_and_says_nothing_itself(tmp_path, how, signum):
    child = die(tmp_path, how)
    assert child.returncode == -signum
    assert child.stderr_text == ""
    stack = stack_dumps.crash_stack(tmp_path, 3, child.pid, signum)
    own = [frame.function for frame in stack if not frame.is_library]
    assert own == ["hurt", "train", "<module>"]
    assert stack_dumps.own_frame(stack).file == str(tmp_path / "child.py")
    assert stack_dumps.crash_stack(tmp_path, 3, child.pid, signal.SIGTERM) == ()
    assert stack_dumps.crash_stack(tmp_path, 3, child.pid + 1, signum) == ()


def test_a_crash_in_a_native_thread_shows_where_the_main_thread_was(tmp_path):
    libc = "libc = ctypes.CDLL(None)"
    how = (
        "import _thread; raiser = ctypes.cast(libc.abort, ctypes.c_void_p); "
        "handle = ctypes.c_ulong(); "
        "libc.pthread_create(ctypes.byref(handle), None, raiser, None); time.sleep(1000)"
    )
    child = die(tmp_path, how, first=libc)
    assert child.returncode == -signal.SIGABRT
    assert (
        stack_dumps.own_frame(
            stack_dumps.crash_stack(tmp_path, 3, child.pid, signal.SIGABRT)
        ).function
        == "hurt"
    )


def test_a_fault_handler_of_the_scripts_own_keeps_its_file(tmp_path):
    child = die(tmp_path, "os.abort()", first="import faulthandler; faulthandler.enable()")
    assert "Fatal Python error: Aborted" in child.stderr_text
    assert stack_dumps.crash_stack(tmp_path, 3, child.pid, signal.SIGABRT) == ()


def test_a_killed_process_was_seen_shortly_before(tmp_path):
    how = (
        "while 'hurt' not in str(stack_dumps.last_seen(sys.argv[1], 3, os.getpid())):"
        " time.sleep(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = die(tmp_path, how)
    seen = stack_dumps.last_seen(tmp_path, 3, child.pid)
    assert stack_dumps.own_frame(seen.stack).function == "hurt"
    assert 0 <= time.time() - seen.at < 240
    assert stack_dumps.known_processes(tmp_path) == [(3, child.pid)]


def test_a_forked_processs_crash_is_not_taken_for_the_ranks(tmp_path):
    how = "os.fork() or os.abort(); os.wait(); os.kill(os.getpid(), signal.SIGKILL)"
    child = die(tmp_path, how)
    assert stack_dumps.crash_stack(tmp_path, 3, child.pid, signal.SIGKILL) == ()


WORKER = """
import multiprocessing, sys
import anytrain

def work():
    import anytrain
    assert "anytrain" in sys.modules

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
"""


def test_a_rank_is_watched_from_its_first_import_and_its_workers_are_not(tmp_path):
    run_script(WORKER, env={"ANYTRAIN_BEATS": str(tmp_path), "RANK": "5"}, fresh=True)
    assert [rank for rank, _ in stack_dumps.known_processes(tmp_path)] == [5]


def test_a_folder_that_is_gone_is_no_failure(tmp_path):
    stack_dumps.dump_stacks(str(tmp_path / "gone"), 0)
    assert stack_dumps.known_processes(tmp_path / "gone") == []
    assert stack_dumps.last_seen(tmp_path, 0, 1) is None


def test_the_scripts_own_calls_are_shown_and_libraries_folded():
    lib = "/opt/lib/site-packages/torch/nn/functional.py"
    stack = [Frame(lib, 5, "embedding"), Frame(lib, 9, "call"), Frame("/me/train.py", 31, "step")]
    shown = stack_dumps.describe([*stack, Frame(os.__file__, 1, "run")], indent="")
    assert shown.splitlines() == [
        "torch/nn/functional.py line 5, in embedding (1 more call in torch)",
        "/me/train.py line 31, in step",
    ]
    deep = stack_dumps.describe([Frame("/me/train.py", n, "again") for n in range(50)])
    assert len(deep.splitlines()) == 7
    assert "44 calls more" in deep


def test_a_stack_that_is_too_deep_for_the_file_keeps_its_innermost_calls(tmp_path):
    places = stack_dumps.StackFile(str(tmp_path), 0)

    def a_function_with_a_rather_long_name_that_takes_room_in_the_file(depth):
        if depth:
            a_function_with_a_rather_long_name_that_takes_room_in_the_file(depth - 1)
        else:
            places.look()

    a_function_with_a_rather_long_name_that_takes_room_in_the_file(120)
    seen = stack_dumps.last_seen(tmp_path, 0, os.getpid())
    assert seen.stack[2].function.startswith("a_function")
    assert len(seen.stack) >= 20


def test_looking_costs_next_to_nothing(tmp_path):
    places = stack_dumps.StackFile(str(tmp_path), 0)
    best = min(timeit.repeat(places.look, timer=time.process_time, number=10, repeat=20))
    # Four times a second: a millisecond would be a 250th of it.
    assert best / 10 < 1e-3
