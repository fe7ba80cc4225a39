from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import psutil
import pytest

from anytrain.core.errors import BadType, DiskFull, Notice, PeerLost
from anytrain.machine.processes.spawn import SpawnOptions, call
from launching import child_environment, run_script


def crew(size=2, **more):
    return SpawnOptions(size, size, port=1, **more)


def rank():
    import os

    return int(os.environ["RANK"])


def test_rank_zeros_value_comes_back():
    def work(add):
        import os

        return int(os.environ["RANK"]) + int(os.environ["WORLD_SIZE"]) + add

    assert call(work, (10,), crew()) == 12


def test_a_function_of_this_test_takes_its_surroundings_along():
    factor = {"by": 3}
    assert call(lambda values: [v * factor["by"] for v in values], ([1, 2],), crew(1)) == [3, 6]


def test_the_childs_own_error_is_raised_with_its_type_and_traceback():
    def work():
        import os

        if os.environ["RANK"] == "1":
            raise LookupError("no such column")
        import time

        time.sleep(1000)

    begun = time.monotonic()
    with pytest.raises(LookupError, match="no such column") as caught:
        call(work, (), crew())
    assert time.monotonic() - begun < 240
    assert caught.value.__notes__ == ["It was raised by rank 1 of 2."]
    shown = "".join(traceback.format_exception(caught.value))
    assert ", in work" in shown.replace(", in test_the_childs_own_error", "")
    assert 'raise LookupError("no such column")' in shown


def test_an_errors_class_and_words_come_back_whatever_its_init_takes():
    def work():
        class Odd(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} and {two}")

        raise Odd("this", "that")

    with pytest.raises(Exception, match="^this and that") as caught:
        call(work, (), crew(1))
    assert type(caught.value).__name__ == "Odd"


def test_a_child_that_is_killed_is_named():
    def work():
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PeerLost, match="killed by SIGKILL"):
        call(work, (), crew())


def test_a_call_that_cannot_be_packed_is_refused_here():
    with pytest.raises(BadType, match="Cannot hand"):
        call(lambda lock: None, (__import__("threading").Lock(),), crew(1))


def test_a_failed_attempt_is_tried_again(tmp_path):
    def work(path):
        from pathlib import Path

        if not Path(path).exists():
            Path(path).touch()
            raise RuntimeError("first time")
        return "second time"

    with pytest.warns(Notice, match="Attempt 1 of 2 failed .* RuntimeError: first time"):
        assert call(work, (str(tmp_path / "seen"),), crew(1, max_restarts=1)) == "second time"


def test_output_is_shown_where_this_process_prints(capsys):
    def work():
        import os

        print("hello from", os.environ["RANK"])

    call(work, (), crew(prefix="[${rank}/${local_rank}] "))
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == ["[0/0] hello from 0", "[1/1] hello from 1"]


def test_lines_and_characters_come_whole(capsys):
    def work():
        import os
        import sys
        import time

        for part in ("é".encode()[:1], "é".encode()[1:] + b"\rbar\r"):
            os.write(1, part)
            time.sleep(0.1)
        print("no end of line", end="")
        print("aside", file=sys.stderr)

    call(work, (), crew(1))
    assert tuple(capsys.readouterr()) == ("é\rbar\rno end of line", "aside\n")


def test_every_ranks_value_comes_back_on_request():
    def work():
        import os

        return os.environ["RANK"] * 2

    assert call(work, (), crew(3, brings_all=True)) == ["00", "11", "22"]


def test_a_call_that_takes_too_long_is_ended_and_says_where_each_rank_was():
    def wait_for_a_friend():
        import time

        time.sleep(1000)

    begun = time.monotonic()
    with pytest.raises(PeerLost, match="ended after 8 s") as caught:
        call(wait_for_a_friend, (), crew(timeout_s=8.0))
    assert time.monotonic() - begun < 240
    for rank in (0, 1):
        assert f"rank {rank} was before its first step with anytrain, in" in caught.value.why
    assert "in wait_for_a_friend" in caught.value.why


def test_an_errors_causes_come_along():
    def work():
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("no key") from error

    with pytest.raises(ValueError, match="no key") as caught:
        call(work, (), crew(1))
    assert isinstance(caught.value.__cause__, KeyError)
    shown = "".join(traceback.format_exception(caught.value))
    assert '{}["key"]' in shown


def test_another_machines_ranks_bring_no_value_and_that_is_no_news(recwarn):
    assert call(os.getpid, (), SpawnOptions(1, 2, first_rank=1, port=1)) is None
    assert not [each for each in recwarn if each.category is Notice]


def test_leaving_by_sys_exit_is_no_error_but_its_code_is():
    def leave(code):
        import sys

        sys.exit(code)

    assert call(leave, (0,), crew(1)) is None
    with pytest.raises(PeerLost, match="exit code 3"):
        call(leave, (3,), crew(1))


def test_fork_takes_what_cannot_be_pickled_along(capsys):
    lock = threading.Lock()

    def work():
        import asyncio
        import os

        print("rank", os.environ["RANK"])
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return lock.locked(), os.getpid()

    async def in_a_loop():
        return call(work, (), crew(forks=True, brings_all=True))

    values = asyncio.run(in_a_loop())
    assert [locked for locked, _ in values] == [False, False]
    assert os.getpid() not in [pid for _, pid in values]
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0", "rank 1"]


def test_a_forks_error_is_raised_here():
    def work():
        raise LookupError("no such column")

    with pytest.raises(LookupError, match="no such column") as caught:
        call(work, (), crew(forks=True))
    assert ", in work" in "".join(traceback.format_exception(caught.value))


def test_a_call_from_a_running_event_loop_works():
    async def launch():
        return call(lambda: "done", (), crew())

    assert asyncio.run(launch()) == "done"


def test_children_that_ignore_an_interrupt_are_killed_two_seconds_later(tmp_path):
    folder = str(tmp_path)

    def work():
        import os
        import signal
        import time
        from pathlib import Path

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Path(folder, "pid").write_text(str(os.getpid()))
        time.sleep(1000)

    def interrupt():
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        call(work, (), crew(1))
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_children_that_save_their_work_may_finish_it(tmp_path):
    folder = str(tmp_path)

    def work():
        import os
        import time
        from pathlib import Path

        from anytrain.machine.processes import notes

        try:
            Path(folder, "begun").touch()
            time.sleep(1000)
        except KeyboardInterrupt:
            notes.set_flag(os.environ["ANYTRAIN_BEATS"], notes.SAVING)
            time.sleep(2.5)
            Path(folder, "saved").touch()

    def interrupt():
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        call(work, (), crew(1))
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1])
def test_an_interrupt_while_children_start_ends_them_without_a_word(tmp_path, seconds):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from anytrain.machine.processes.spawn import SpawnOptions, call\n"
        "call(lambda: time.sleep(1000), (), SpawnOptions(2, 2, port=1))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        env={**child_environment(), "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    while not (children := psutil.Process(parent.pid).children()):
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=240)
    assert err.count("Traceback") == 1
    assert "Fatal" not in err
    psutil.wait_procs(children, timeout=240)
    assert not any(child.is_running() for child in children)
    assert not list(tmp_path.glob("anytrain-*"))


def test_children_find_anytrain_where_the_notebook_found_it(tmp_path):
    bare = getattr(sys, "_base_executable", sys.executable)
    if bare == sys.executable:
        pytest.skip("this is no virtual environment: every python has its packages")
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.extend({sys.path!r})\n"
        "from anytrain.machine.processes.spawn import SpawnOptions, call\n"
        "if __name__ == '__main__':\n"
        "    print(call(lambda: sys.executable, (), SpawnOptions(1, 1, port=1)))\n"
    )
    ran = subprocess.run([bare, str(script)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stdout.startswith(sys.prefix)


def test_ctrl_c_ends_the_children_and_leaves_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from anytrain.machine.processes.spawn import SpawnOptions, call\n"
        "def work(folder):\n"
        "    import os\n"
        "    Path(folder, os.environ['RANK']).write_text(str(os.getpid()))\n"
        "    time.sleep(1000)\n"
        "call(work, (sys.argv[1],), SpawnOptions(2, 2, port=1))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env={**child_environment(), "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    files = [tmp_path / "0", tmp_path / "1"]
    deadline = time.monotonic() + 240
    while not all(f.exists() and f.read_text() for f in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=240)
    assert b"KeyboardInterrupt" in err
    assert not any(psutil.pid_exists(int(f.read_text())) for f in files)
    assert not list(tmp_path.glob("anytrain-*"))


def test_the_rank_that_failed_first_is_named_not_the_one_with_the_lowest_number():
    def work():
        import os
        import time

        if rank() == 1:
            raise ValueError("the cause")
        while not os.path.exists(os.path.join(os.environ["ANYTRAIN_BEATS"], "rank-1.note")):
            time.sleep(0.001)
        raise RuntimeError("a consequence")

    with pytest.raises(ValueError, match="the cause"):
        call(work, (), crew(interval_s=0.5))


def test_what_a_rank_says_when_it_is_asked_to_stop_is_not_the_cause(tmp_path):
    def work():
        import os
        import signal
        import time

        def stop(*_):
            raise RuntimeError("I was asked to stop")

        signal.signal(signal.SIGTERM, stop)
        open(f"{folder}/{rank()}", "w").close()
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    folder = str(tmp_path)
    with pytest.raises(PeerLost, match="Rank 1 of 2 .* was killed by SIGKILL"):
        call(work, (), crew())


def test_an_interrupt_that_the_function_raises_is_an_error_like_any_other():
    def work():
        import time

        if rank() == 1:
            raise KeyboardInterrupt
        time.sleep(1000)

    with pytest.raises(KeyboardInterrupt) as caught:
        call(work, (), crew())
    assert caught.value.__notes__ == ["It was raised by rank 1 of 2."]


def test_a_rank_that_waits_for_one_that_has_returned_is_told_so(tmp_path):
    lost = "[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1"

    def work():
        import os
        import time
        from pathlib import Path

        import psutil

        left = Path(folder, "pid")
        if rank() == 0:
            left.with_suffix(".new").write_text(str(os.getpid()))
            left.with_suffix(".new").replace(left)
            return
        while not left.exists() or psutil.pid_exists(int(left.read_text())):
            time.sleep(0.01)  # until the parent has seen its end
        raise RuntimeError(lost)

    folder = str(tmp_path)
    with pytest.raises(PeerLost) as caught:
        call(work, (), crew())
    assert caught.value.what.startswith("Rank 1 of 2 waited ")
    assert caught.value.what.endswith(" for rank 0, which had already ended.")
    assert "the same collective calls" in caught.value.why
    assert "in work" in caught.value.why
    assert "another machine" not in str(caught.value)


def test_a_lost_peer_on_one_machine_where_nobody_died_is_the_error_itself():
    def work():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed by peer") as caught:
        call(work, (), crew(1))
    assert type(caught.value) is RuntimeError


def test_a_value_that_finds_no_room_is_a_full_disk_and_not_a_value_that_cannot_travel():
    def work():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        return bytearray(2**21)

    with pytest.raises(DiskFull, match="Cannot bring back what work returned") as caught:
        call(work, (), crew(1))
    assert "File too large" in caught.value.why


def test_a_value_that_this_process_cannot_import_is_told_as_that(tmp_path):
    (tmp_path / "only_there.py").write_text("class Thing: pass\n")
    folder = str(tmp_path)

    def work():
        import sys

        sys.path.insert(0, folder)
        import only_there

        return only_there.Thing()

    with pytest.raises(BadType, match="Cannot bring back") as caught:
        call(work, (), crew(1))
    assert "No module named 'only_there'" in caught.value.why


def test_every_exit_code_but_zero_is_a_failure():
    def leave(code):
        import sys

        sys.exit(code)

    with pytest.raises(PeerLost, match=r"left by sys.exit\(256\)"):
        call(leave, (256,), crew(1))
    with pytest.raises(PeerLost, match=r"left by sys.exit\('some words'\)"):
        call(leave, ("some words",), crew(1))


def test_a_fresh_process_reads_nothing_and_has_the_same_interpreter():
    def work():
        import sys

        return sys.stdin.read(), sys.flags.safe_path, sys.flags.optimize

    assert call(work, (), crew(1)) == ("", True, sys.flags.optimize)


def test_the_notebooks_own_classes_can_be_pickled_by_name_in_a_child():
    script = """
    from multiprocessing import get_context
    from anytrain import debug_launcher
    import pickle

    class Net:
        pass

    def double(x):
        return 2 * x

    def work():
        pickle.dumps(Net())
        with get_context("fork").Pool(1) as pool:
            return pool.map(double, [1, 2])

    if __name__ == "__main__":
        print(debug_launcher(work))
    """
    assert run_script(script).stdout == "[2, 4]\n"


def test_a_process_left_behind_holds_no_output_open(capsys):
    def work():
        import subprocess

        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    gc.collect()  # what earlier tests left open is theirs
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    begun = time.monotonic()
    for pid in call(work, (), crew(brings_all=True)):
        os.kill(pid, signal.SIGKILL)
    assert time.monotonic() - begun < 240
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() <= threads


def test_two_forked_launches_at_once_do_not_hold_each_other(tmp_path):
    flag = str(tmp_path / "over")

    def wait():
        import os
        import time

        while not os.path.exists(flag):
            time.sleep(0.02)
        return "long"

    found = []
    first = threading.Thread(target=lambda: found.append(call(wait, (), crew(forks=True))))
    first.start()
    time.sleep(0.3)
    assert call(lambda: "short", (), crew(forks=True)) == "short"
    (tmp_path / "over").touch()
    first.join()
    assert found == ["long"]
