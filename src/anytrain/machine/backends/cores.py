"""How many cores a process may use, and how many threads it should compute with.

More threads than cores wait for each other at the end of every operation. torch counts the
machine's cores: it sees neither a container's share of them nor the other ranks.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from anytrain.core import environment
from anytrain.core.plan import Choice
from anytrain.machine.processes import host_limits

_TOLD_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def num_cores() -> int:
    """Return the cores this process may run on, each thread of a core counted."""
    return len(_allowed())


def cores_each(num_ranks: int, root: Path = Path("/")) -> int:
    """Return how many cores each of this host's ranks has, each thread of a core counted."""
    share = _share(root)
    cores = num_cores() if share is None else min(num_cores(), int(share))
    return max(1, cores // num_ranks)


def usable_cores(root: Path = Path("/")) -> Choice:
    """Return how many cores this process can keep busy, and what sets the bound."""
    allowed = _allowed()
    whole = _physical(root, allowed)
    share = _share(root)
    if share is not None and share < whole:
        return Choice(str(max(1, int(share))), f"the control group allows {share:g} of them")
    if whole < len(allowed):
        return Choice(str(whole), f"{len(allowed)} threads share {whole} cores")
    return Choice(str(whole), "cores that this process may run on")


def threads(num_ranks: int, root: Path = Path("/")) -> Choice:
    """Return how many threads each of this host's ranks should compute with, and why."""
    for name in _TOLD_BY:
        told = environment.variable(name)
        if told:
            return Choice(str(torch.get_num_threads()), f"{name}={told}")
    cores = usable_cores(root)
    count = max(1, int(cores.value) // num_ranks)
    if torch.get_num_threads() not in (num_cores(), int(cores.value), count):
        return Choice(str(torch.get_num_threads()), "set in this process")
    shared = "" if num_ranks == 1 else f", for {num_ranks} processes"
    return Choice(str(count), f"{cores.value} cores: {cores.because}{shared}")


def settle_threads() -> None:
    """Let torch use this rank's part of the cores, unless the user has said how many."""
    chosen = int(threads(environment.read().place.local_size).value)
    if chosen < torch.get_num_threads():
        torch.set_num_threads(chosen)


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical(root: Path, allowed: set[int]) -> int:
    """Return how many whole cores the allowed threads of cores belong to."""
    cores = set()
    for number in allowed:
        siblings = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:  # not Linux, or it does not tell
            cores.add(str(number))
    return len(cores)


def _share(root: Path) -> float | None:
    """Return how many cores' time the control groups allow; None where all of it."""
    shares = []
    for text in host_limits.cgroup_values(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        # v1 keeps the period in another file, and nobody changes it from 100 ms.
        if quota.isdigit() and int(quota) > 0:
            shares.append(int(quota) / int(period or 100_000))
    return min(shares, default=None)
