"""Processes that really die, each in its own way: the messages differ, and every one is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launching import run_command

SCRIPT = """
import ctypes, mmap, os, signal, sys, time
{start}

def hurt(how):
    if how == "segv":
        ctypes.string_at(0)
    if how == "kill":
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "memory":
        held = []
        while True:
            held.append(bytearray(32 * 2**20))
            time.sleep(0.03)
    if how == "refused":
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
        time.sleep(2)
        bytearray(2**32)
    if how == "shared":
        with open("/dev/shm/all-of-it", "wb") as file:
            try:
                while True:
                    file.write(bytes(2**20))
                    file.flush()
            except OSError:
                pass
        with open("/dev/shm/more", "w+b") as file:
            file.truncate(2**22)
            with mmap.mmap(file.fileno(), 2**22) as page:
                page[:] = bytes(2**22)

def train(how):
    if os.environ["RANK"] == "1":
        hurt(how)
    time.sleep(1000)

{call}
"""
WAYS = {
    "launch": {"start": "import anytrain", "call": "train(sys.argv[1])"},
    "call": {
        "start": "from anytrain.machine.processes.spawn import SpawnOptions, call",
        "call": 'if __name__ == "__main__":\n    call(train, (sys.argv[1],), SpawnOptions(2, 2))',
    },
}


@pytest.fixture
def die(tmp_path):
    def run(way, how, before=()):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(**WAYS[way]))
        launcher = ["-m", "anytrain", "launch", "--cpu", "-n", 2] if way == "launch" else []
        command = [*before, sys.executable, *launcher, script, how]
        return run_command(command, cwd=tmp_path, env={"TMPDIR": str(tmp_path)}, check=False)

    return run


@pytest.fixture
def limited():
    """Give a command's beginning that puts it into a control group of 900 MiB, or skip.

    A launcher and two ranks that have imported torch hold about 460 MiB of their own: what is
    left must last for some looks at the ranks' memory, or none of them sees it grow.
    """
    for folder, limit in _group_places():
        made = folder / f"anytrain-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / limit).write_text(str(900 * 2**20))
            if (made / "memory.swap.max").exists():
                (made / "memory.swap.max").write_text("0")
        except OSError:
            made.rmdir()
            continue
        yield ["sh", "-c", f'echo $$ > {made}/cgroup.procs && exec "$@"', "sh"]
        made.rmdir()
        return
    pytest.skip("this machine lets nobody make a control group with a memory limit here")


def _group_places():
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            yield Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        if controllers == "":
            yield Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"


@pytest.fixture
def little_shared_memory():
    """Give a command's beginning that runs it with 8 MiB of shared memory, or skip."""
    mount = "mount -t tmpfs -o size=8m tmpfs /dev/shm"
    words = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    try:
        tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no unshare here: {error}")
    if tried.returncode:
        pytest.skip(f"this machine lets nobody mount a shared memory of its own: {tried.stderr}")
    return words


@pytest.mark.parametrize("way", WAYS)
def test_a_segmentation_fault_is_told_with_its_line_and_without_blaming_memory(die, way):
    ran = die(way, "segv")
    assert "Rank 1 of 2 (pid " in ran.stderr
    assert "crashed with SIGSEGV before the first step, in " in ran.stderr
    assert "train.py line 7, in hurt" in ran.stderr
    assert "native code failed" in ran.stderr
    assert "ran out" not in ran.stderr
    assert "Memory was short" not in ran.stderr
    assert ran.returncode == (139 if way == "launch" else 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_kill_from_outside_is_told_as_that_with_the_last_place_seen(die, way):
    ran = die(way, "kill")
    assert "was killed by SIGKILL before the first step." in ran.stderr
    assert "something sent it SIGKILL, not anytrain; " in ran.stderr
    assert "train.py line 9, in hurt" in ran.stderr
    assert "ran out" not in ran.stderr
    assert ran.returncode == (137 if way == "launch" else 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_kill_for_want_of_memory_is_told_with_the_kernels_count(die, limited, way):
    ran = die(way, "memory", before=limited)
    assert "was killed by SIGKILL before the first step." in ran.stderr
    assert re.search("it ran out of host memory: .*900 MiB", ran.stderr)
    assert "this control group's count of out-of-memory kills rose from 0 to 1" in ran.stderr
    assert "the largest process of each rank was seen with up to (0: " in ran.stderr
    assert "make the model once outside and pass it in" in ran.stderr
    assert "in hurt" in ran.stderr
    assert ran.returncode == (137 if way == "launch" else 1)


def test_refused_memory_is_an_error_of_its_own_with_the_limit_named(die):
    ran = die("call", "refused")
    assert "MemoryError" in ran.stderr
    assert "its address space may be 2.0 GiB (ulimit -v)" in ran.stderr


def test_full_shared_memory_is_told_as_that(die, little_shared_memory):
    ran = die("call", "shared", before=little_shared_memory)
    assert "crashed with SIGBUS before the first step, in " in ran.stderr
    assert "shared memory ran out: /dev/shm of 8 MiB was full." in ran.stderr
    assert "--shm-size" in ran.stderr
