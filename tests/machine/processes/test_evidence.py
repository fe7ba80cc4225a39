"""Numbers of the system: this machine's own, and other machines' files laid out in a folder."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import pytest

from anytrain.machine.processes import host_limits, supervise
from anytrain.machine.processes.host_limits import Space
from launching import child_environment


def lay(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_limit_of_version_2_counts_with_what_was_in_use_under_it(tmp_path):
    group = "sys/fs/cgroup/slice/job"
    files = {
        "proc/self/cgroup": "0::/slice/job\n",
        f"{group}/memory.events": "low 0\noom 2\noom_kill 2\n",
        f"{group}/memory.max": "max\n",
        "sys/fs/cgroup/slice/memory.max": "1000\n",
        "sys/fs/cgroup/slice/memory.peak": "990\n",
    }
    marks = host_limits.memory_marks(lay(tmp_path, files))
    assert (marks.oom_kills, marks.limit_bytes, marks.peak_bytes) == (2, 1000, 990)
    assert marks.is_own_group


def test_version_1_is_read_too_and_its_largest_number_is_no_limit(tmp_path):
    group = "sys/fs/cgroup/memory/docker/x"
    files = {
        "proc/self/cgroup": "5:devices:/\n4:memory:/docker/x\n0::/\n",
        f"{group}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
        f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
        "sys/fs/cgroup/memory/memory.max_usage_in_bytes": "1999\n",
    }
    marks = host_limits.memory_marks(lay(tmp_path, files))
    assert (marks.oom_kills, marks.limit_bytes, marks.peak_bytes) == (7, 2000, 1999)


def test_without_groups_the_whole_machines_count_is_read_and_said_to_be_that(tmp_path):
    marks = host_limits.memory_marks(lay(tmp_path, {"proc/vmstat": "pgfault 9\noom_kill 5\n"}))
    assert (marks.oom_kills, marks.limit_bytes, marks.is_own_group) == (5, None, False)
    assert host_limits.memory_marks(tmp_path / "nothing").oom_kills is None


@pytest.mark.parametrize(("free", "full"), [(0, True), (2**19, True), (2**26, False)])
def test_shared_memory_is_full_where_next_to_nothing_is_free(free, full):
    assert Space(2**30, free).is_full == full


def start(code):
    return supervise.start([sys.executable, "-c", code], child_environment())


def end_of(process):
    deadline = time.monotonic() + 240
    while supervise.poll(process) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process.returncode


def test_each_child_has_a_peak_of_its_own(tmp_path):
    big = start("import time; x = bytearray(600 * 2**20); time.sleep(2)")
    small = start("import time; time.sleep(2)")
    assert supervise.first_failure([big, small]) is None
    peaks = [
        supervise.collect_evidence(tmp_path, 0, child.pid, 0).peak_bytes for child in (big, small)
    ]
    assert 600 * 2**20 < peaks[0] < 700 * 2**20
    # Not what this process had when it started it, which the kernel's own figure counts.
    assert peaks[1] < 100 * 2**20


def test_a_peak_that_lasts_a_moment_is_known_from_the_kernel(tmp_path):
    # The kernel's figure of a child counts what this process had when it started it.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    size = max(own, 800 * 2**20) + 200 * 2**20
    child = start(f"import os; x = bytearray({size}); os._exit(3)")
    assert end_of(child) == 3
    # The kernel's figure is no exact one: it was once found 7 MiB short.
    assert supervise.collect_evidence(tmp_path, 0, child.pid, 3).peak_bytes > size - 50 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells another process's limits")
def test_a_limit_that_the_child_set_itself_is_seen(tmp_path):
    limit = "import resource, time; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)); "
    child = start(limit + "time.sleep(2)")
    end_of(child)
    assert supervise.collect_evidence(tmp_path, 0, child.pid, 0).address_limit_bytes == 2**31


def test_a_process_that_somebody_else_has_asked_keeps_its_exit_code():
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(4)"])
    process.wait()
    assert supervise.poll(process) == 4
