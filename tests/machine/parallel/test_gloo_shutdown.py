"""The end of a rank whose gloo threads are slow to let go of a collective's tensors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launching import launch

# Threads of gloo that are busy before each lock: to Python, as if they had to wait for a core.
SLOW_GLOO = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    static int (*real)(pthread_mutex_t *);
    char name[16] = "";
    if (!real) real = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (!strcmp(name, "pt_gloo_runloop"))
        for (double end = now() + 0.02; now() < end;);
    return real(mutex);
}
"""
# The long sum is in C: it keeps Python's lock to the end.
SCRIPT = """
import atexit, sys
atexit.register(sum, range(20_000_000))
import torch, torch.distributed as dist

dist.init_process_group("gloo")
kept = dist.group.WORLD  # as a model in DDP keeps it
if sys.argv[1] == "anytrain":
    from anytrain import Accelerator
    Accelerator(cpu=True)


def last_words():
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    print("done", flush=True)


atexit.register(last_words)
"""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def slow_gloo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow_gloo")
    (folder / "slow.c").write_text(SLOW_GLOO)
    library = folder / "slow.so"
    words = ["cc", "-shared", "-fPIC", "-o", library, folder / "slow.c", "-ldl"]
    subprocess.run(words, check=True, capture_output=True, timeout=240)
    return library


def test_a_rank_ends_well_whose_gloo_threads_are_slow(slow_gloo: Path) -> None:
    ran = launch(SCRIPT, 2, "anytrain", env={"LD_PRELOAD": str(slow_gloo)})
    assert ran.stdout.count("done") == 2


def test_with_torch_alone_it_dies(slow_gloo: Path) -> None:
    # Once torch sees to it, this fails, and what it tests beside can go.
    ran = launch(SCRIPT, 2, "torch", env={"LD_PRELOAD": str(slow_gloo)}, check=False)
    assert ran.stdout.count("done") == 2
    assert "terminate called without an active exception" in ran.stderr
