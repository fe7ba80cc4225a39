"""Real processes, real signals; a folder of files stands in for the store, so no torch loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from anytrain.machine.processes.heartbeat import Pulse
from anytrain.machine.processes.stalls import Frozen, RankWatch, describe_frozen, process_state
from launching import child_environment

STALL_S = 3.0
"""Long enough for a busy machine to let each rank speak."""
RANK = """
import os, sys, time
from pathlib import Path
from anytrain.machine.processes.heartbeat import Pulse
from anytrain.machine.processes.stalls import RankWatch

folder, rank, size, mode = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
stall_s = float(sys.argv[5])

class Files:
    def post(self, key, value):
        self.hang()
        path = folder / key.replace("/", "-")
        path.with_suffix(".new").write_text(value)
        path.with_suffix(".new").replace(path)

    def read_all(self, keys):
        self.hang()
        paths = [folder / key.replace("/", "-") for key in keys]
        return [path.read_text() if path.exists() else None for path in paths]

    def hang(self):
        while (folder / "store-hangs").exists():
            time.sleep(0.05)

beats = str(folder) if mode == "launched" else None
pulse = Pulse(rank, beats)
pulse.mark(7, "forward")
watch = RankWatch(pulse, Files(), size, stall_s, store_rank=0 if mode == "holds" else None)
(folder / f"ready-{rank}").touch()
while mode == "busy" and rank == 1 and not (folder / "compute").exists():
    time.sleep(0.05)
if mode == "busy" and rank == 1:
    import re
    re.match(r"(a+)+$", "a" * 26 + "b")   # keeps Python's lock for seconds
    (folder / "computed").touch()
while not os.access(folder / "done", os.F_OK):  # no call into a library: its line would be shown
    time.sleep(0.05)
watch.leave()
print("left in peace", flush=True)
"""


class Job:
    def __init__(self, folder, size, mode, stall_s):
        self.folder, self.size = folder, size
        script = folder / "rank.py"
        script.write_text(RANK)
        self.ranks = [
            subprocess.Popen(
                [sys.executable, script, folder, str(rank), str(size), mode, str(stall_s)],
                env=child_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(size)
        ]
        wait_until(lambda: all((folder / f"ready-{r}").exists() for r in range(size)))
        self.beat()  # each speaks of where it waits,
        self.beat()  # and is heard

    def beat(self):
        """Wait until each rank has spoken, and heard what was said by now."""
        heard = self.counts()
        wait_until(
            lambda: all(now > then + 1 for now, then in zip(self.counts(), heard, strict=True))
        )

    def counts(self):
        return [json.loads(self.said(rank))[0] for rank in range(self.size)]

    def said(self, rank):
        path = self.folder / f"beat-{rank}"
        return path.read_text() if path.exists() else "[0]"

    def signal(self, signum, *ranks):
        for rank in ranks:
            self.ranks[rank].send_signal(signum)

    def output(self, rank, timeout=240):
        out, err = self.ranks[rank].communicate(timeout=timeout)
        return self.ranks[rank].returncode, out, err

    def end(self):
        for rank in self.ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.communicate()


def wait_until(condition, seconds=240.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(size=2, mode="alone", stall_s=STALL_S):
        jobs.append(Job(tmp_path, size, mode, stall_s))
        return jobs[-1]

    yield start
    for each in jobs:
        each.end()


def test_a_stopped_rank_is_named_and_the_job_ends(job):
    running = job()
    running.signal(signal.SIGSTOP, 1)
    code, _, err = running.output(0)
    assert code != 0
    assert "Its Python stack when it last spoke:\n" in err
    assert f"    {running.folder}/rank.py line " in err
    assert len(err.splitlines()) == 4
    pid = running.ranks[1].pid
    assert f"Rank 1 (pid {pid} on " in err
    assert "is stopped (SIGSTOP, or Ctrl-Z); it was at step 7 (forward), in rank.py line" in err
    assert running.output(1)[0] == -signal.SIGKILL, "other launchers would wait for it"


def test_the_lowest_living_rank_speaks_for_all(job):
    running = job(size=3)
    running.signal(signal.SIGSTOP, 0)
    code, _, err = running.output(1)
    assert code != 0
    assert "Rank 0 (pid" in err
    assert running.ranks[2].poll() is None, "one speaks; the launcher ends the others"


def test_a_launcher_of_ours_is_told_instead_of_the_terminal(job, tmp_path):
    running = job(mode="launched")
    running.signal(signal.SIGSTOP, 1)
    code, _, err = running.output(0)
    assert (code, err) == (1, "")
    assert "is stopped" in (tmp_path / "rank-0.note").read_text()
    assert running.ranks[1].poll() is None, "the launcher ends it"


def test_suspending_and_waking_the_whole_job_kills_nobody(job, tmp_path):
    running = job()
    running.signal(signal.SIGSTOP, 0, 1)
    time.sleep(2 * STALL_S)
    running.signal(signal.SIGCONT, 1)
    time.sleep(0.5)
    running.signal(signal.SIGCONT, 0)
    running.beat()
    time.sleep(STALL_S)
    (tmp_path / "done").touch()
    assert [running.output(r) for r in (0, 1)] == [(0, "left in peace\n", "")] * 2


def test_a_frozen_holder_of_the_store_is_named_though_the_store_hangs(job, tmp_path):
    running = job(mode="holds")
    running.signal(signal.SIGSTOP, 0)
    (tmp_path / "store-hangs").touch()
    code, _, err = running.output(1)
    assert code != 0
    assert "Rank 0 (pid" in err
    assert "is stopped" in err


def test_a_launcher_that_hangs_with_the_store_ends_nobody(job, tmp_path):
    running = job()
    (tmp_path / "store-hangs").touch()
    time.sleep(2 * STALL_S)
    (tmp_path / "store-hangs").unlink()
    (tmp_path / "done").touch()
    assert [running.output(r) for r in (0, 1)] == [(0, "left in peace\n", "")] * 2


def test_a_rank_that_computes_without_letting_python_run_is_not_killed(job, tmp_path):
    running = job(mode="busy", stall_s=1.5)
    (tmp_path / "compute").touch()
    wait_until(lambda: (tmp_path / "computed").exists() or running.ranks[1].poll() is not None)
    (tmp_path / "done").touch()
    code, out, _ = running.output(1)
    assert (code, out) == (0, "left in peace\n")
    assert running.output(0)[0] == 0


def test_a_rank_that_has_left_is_not_missed(job, tmp_path):
    running = job()
    (tmp_path / "done").touch()
    running.output(1)
    assert running.output(0) == (0, "left in peace\n", "")


def test_ranks_end_with_the_launcher_they_talked_to(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, str(tmp_path / "rank.py"), str(tmp_path), "0", "2", "launched", "3"]
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.Popen({command!r}).wait()"],
        env=child_environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until((tmp_path / "ready-0").exists)
    launcher.kill()
    _, err = launcher.communicate(timeout=240)
    assert "rank 0 ends: its launcher is gone" in err


def test_leaving_waits_for_a_connection_that_is_still_being_opened():
    opened, begun, watches = [], threading.Event(), threading.Semaphore(0)

    class SlowToOpen:
        def post(self, key, value):
            begun.set()
            if not opened:
                assert watches.acquire(timeout=240)  # it is made by now
                assert watch._stop.wait(240)
                time.sleep(0.5)
            opened.append(value)

        def read_all(self, keys):
            return [None for _ in keys]

    watch = RankWatch(Pulse(0, None), SlowToOpen(), 2, 1.5, store_rank=None)
    watches.release()
    assert begun.wait(240)
    watch.leave()
    assert not any(thread.name == "anytrain-beat" for thread in threading.enumerate())
    assert len(opened) == 2  # the first beat, and the goodbye


def test_a_rank_that_never_spoke_is_known_by_its_file_and_not_taken_for_another_machines(tmp_path):
    class Silent:
        def post(self, key, value):
            pass

        def read_all(self, keys):
            return [None for _ in keys]

    Pulse(1, str(tmp_path)).mark(3, "forward")
    told = []
    watch = RankWatch(
        Pulse(0, str(tmp_path)), Silent(), 2, 60.0, None, lambda *found: told.extend(found)
    )
    watch._act(Frozen(1, 60.0, None))
    watch.leave()
    verdict, state = told
    assert verdict.beat.step == 3
    assert state == "silent"
    assert "another machine" in describe_frozen(Frozen(1, 60.0, None), process_state(None)).why
