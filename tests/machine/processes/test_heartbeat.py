from __future__ import annotations

import os
import signal
import timeit

from anytrain.machine.processes.heartbeat import Pulse, read_beat
from launching import run_script


def test_a_mark_costs_less_than_two_microseconds(tmp_path):
    pulse = Pulse(0, str(tmp_path))
    best = min(timeit.repeat(lambda: pulse.mark(7, "backward"), number=2_000, repeat=50))
    assert best / 2_000 < 2e-6


def test_the_last_mark_is_read_from_the_folder(tmp_path):
    Pulse(3, str(tmp_path)).mark(12, "saving")
    beat = read_beat(tmp_path, 3)
    assert (beat.rank, beat.pid, beat.step, beat.doing) == (3, os.getpid(), 12, "saving")
    assert beat.where() == "at step 12 (saving)"


def test_a_mark_survives_the_kill_of_its_process(tmp_path):
    script = """
    import os, signal, sys
    from anytrain.machine.processes.heartbeat import Pulse
    Pulse(0, sys.argv[1]).mark(41, "forward")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    ran = run_script(script, tmp_path, check=False)
    assert ran.returncode == -signal.SIGKILL
    assert read_beat(tmp_path, 0).step == 41


def test_waiting_is_seen_from_outside_and_ends(tmp_path):
    pulse = Pulse(0, str(tmp_path))
    pulse.mark(5, "evaluating")
    with pulse.waiting("barrier 'all here'"):
        inside = read_beat(tmp_path, 0)
    after = read_beat(tmp_path, 0)
    assert (inside.waiting, inside.where()) == (True, "at step 5 (barrier 'all here')")
    assert (after.waiting, after.doing) == (False, "evaluating")
    assert after.moves > inside.moves


def test_a_place_where_an_error_struck_stays_readable(tmp_path):
    pulse = Pulse(0, str(tmp_path))
    try:
        with pulse.waiting("gather"):
            raise RuntimeError
    except RuntimeError:
        pass
    assert read_beat(tmp_path, 0).doing == "gather"


def test_long_words_are_cut_and_not_refused(tmp_path):
    Pulse(0, str(tmp_path)).mark(1, "ü" * 200)
    assert read_beat(tmp_path, 0).doing.startswith("üüü")


def test_a_folder_that_is_gone_only_means_that_nobody_listens(tmp_path):
    pulse = Pulse(0, str(tmp_path / "gone"))
    pulse.mark(1, "forward")
    assert pulse.beat().step == 1
    assert read_beat(tmp_path / "gone", 0) is None


def test_processes_load_no_torch():
    rooms = "stalls error_hooks notes heartbeat spawn supervise crashes"
    rooms += " child stack_dumps host_limits pickling exceptions"
    imports = "\n".join(f"import anytrain.machine.processes.{room}" for room in rooms.split())
    run_script(f"{imports}\nimport sys; assert 'torch' not in sys.modules")
