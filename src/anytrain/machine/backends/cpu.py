"""The CPU: always there, and the reference the other backends are held to.

How many cores a process may use is read here too: more threads than cores wait for each other at
the end of every operation, and torch, which counts the machine's cores, sees neither a
container's share of them nor the other ranks.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.core.facts import Capabilities, Found, MemoryUse, NotFound
from anytrain.core.plan import Choice, Wishes
from anytrain.machine.backends import capabilities
from anytrain.machine.processes import host_limits

# Processes may share cores, so the count of cores is no limit; past this one it is a mistake.
_MOST_PROCESSES = 64
_TOLD_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_MASK_PARTS = 1 << 16
_RAREST_MASK = 64 / _MASK_PARTS
"""The rarest that 16 bits tell well enough: nearer to never or always, each value has its own."""


@dataclass(frozen=True)
class Cpu:
    """The host's processor."""

    index: int | None = None
    name: ClassVar[str] = "cpu"
    process_group: ClassVar[str | None] = "gloo"

    def probe(self) -> Found | NotFound:
        """Return Found: there is always a CPU."""
        return Found(f"{num_cores()} cores", num_devices=1)

    def process_counts(self) -> tuple[int, ...]:
        """Return what gloo can join on one host; processes may share cores."""
        return tuple(range(1, max(num_cores(), _MOST_PROCESSES) + 1))

    def launch_environment(self, num_processes: int, wishes: Wishes) -> Mapping[str, str]:
        """Return nothing: the CPU needs no variable."""
        return {}

    def device(self, local_rank: int) -> torch.device:
        """Return the CPU, which all local ranks share, and take this rank's part of its cores."""
        if self.index:
            raise BadInput(
                f"Cannot use cpu:{self.index}.",
                why="torch has one CPU device for all cores.",
                fix='pass "cpu".',
            )
        settle_threads()
        return torch.device("cpu")

    def capabilities(self, device: torch.device) -> Capabilities:
        """Return what the CPU computes in, and the memory this process may use."""
        # No scaler: fp16 is slower than float32 on a CPU, and bfloat16 needs none. No fused
        # optimizer: reading a flag here waits for nothing, so the host decides.
        return Capabilities(
            backend=self.name,
            device=str(device),
            name=processor(),
            dtypes=capabilities.working_dtypes(device),
            memory_bytes=memory_limit(),
            process_group=self.process_group,
            slow_dtypes=() if _has_bfloat16() else ("bfloat16",),
        )

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        """Return the tensor in host memory; waits, since a half-copied batch can be read here."""
        return tensor.to(device)

    def lane(self, device: torch.device) -> None:
        """Return None: a batch is where it is computed."""

    def end_step(self) -> None:
        """Do nothing: the CPU ran each op as it came."""

    def synchronize(self, device: torch.device) -> None:
        """Return at once: the CPU has done all it was given."""

    def is_idle(self, device: torch.device) -> bool:
        return True

    def memory(self, device: torch.device) -> MemoryUse:
        """Return this process's resident memory, its peak, and what it may use."""
        used = psutil.Process().memory_info().rss
        return MemoryUse(used, max(used, _peak()), memory_limit())

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the host's allocator gave up."""
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        )

    def explain(self, error: BaseException) -> str | None:
        """Say how much memory there is, where it was too little."""
        if not self.is_out_of_memory(error):
            return None
        use = self.memory(torch.device("cpu"))
        gib = 2**30
        return (
            f"Out of host memory: {capabilities.first_line(error)}\n"
            f"This process holds {(use.used_bytes or 0) / gib:.1f} GiB of "
            f"{(use.total_bytes or 0) / gib:.1f} GiB that it may use.\n"
            "Try a smaller batch with more gradient accumulation steps, or fewer loader workers."
        )

    def release(self) -> None:
        gc.collect()

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        return torch.get_rng_state()

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def compilations(self) -> int | None:
        return None


def memory_limit(root: Path = Path("/")) -> int:
    """Return the smaller of the host's memory and the limit of this process's control group."""
    return min([psutil.virtual_memory().total, *_group_limits(root)])


def _group_limits(root: Path) -> list[int]:
    """Read cgroup v2's memory.max and v1's memory.limit_in_bytes, up to the top of the tree."""
    texts = host_limits.cgroup_values(root, "memory", "memory.max", "memory.limit_in_bytes")
    return [int(text) for text in texts if text.isdigit()]  # v2 says "max" where there is no limit


def _peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16 (AVX512-BF16, AMX; Arm: unknown, so no)."""
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name)() for name in known if hasattr(torch.cpu, name))


def processor() -> str:
    """Return what the host's processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Return the cores this process may run on, each thread of a core counted."""
    return len(_allowed())


def cores_each(num_ranks: int, root: Path = Path("/")) -> int:
    """Return how many cores each of this host's ranks has, each thread of a core counted."""
    share = _share_of_cores(root)
    cores = num_cores() if share is None else min(num_cores(), int(share))
    return max(1, cores // num_ranks)


def usable_cores(root: Path = Path("/")) -> Choice:
    """Return how many cores this process can keep busy, and what sets the bound."""
    allowed = _allowed()
    whole = _num_physical(root, allowed)
    share = _share_of_cores(root)
    if share is not None and share < whole:
        return Choice(str(max(1, int(share))), f"the control group allows {share:g} of them")
    if whole < len(allowed):
        return Choice(str(whole), f"{len(allowed)} threads share {whole} cores")
    return Choice(str(whole), "cores that this process may run on")


def threads(num_ranks: int, root: Path = Path("/")) -> Choice:
    """Return how many threads each of this host's ranks should compute with, and why."""
    for name in _TOLD_BY:
        setting = environment.variable(name)
        if setting:
            return Choice(str(torch.get_num_threads()), f"{name}={setting}")
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


def _num_physical(root: Path, allowed: set[int]) -> int:
    """Return how many whole cores the allowed threads of cores belong to."""
    cores = set()
    for number in allowed:
        siblings = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:  # not Linux, or it does not tell
            cores.add(str(number))
    return len(cores)


def _share_of_cores(root: Path) -> float | None:
    """Return how many cores' time the control groups allow; None where all of it."""
    shares = []
    for text in host_limits.cgroup_values(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        # v1 keeps the period in another file, and nobody changes it from 100 ms.
        if quota.isdigit() and int(quota) > 0:
            shares.append(int(quota) / int(period or 100_000))
    return min(shares, default=None)


@contextmanager
def quick_dropout() -> Iterator[None]:
    """Draw dropout's masks from a quarter of the random numbers inside the block.

    torch draws a number for each value, one after the other in one thread: with two cores a sixth
    of a small BERT's step. Here one number of 64 bits decides on four values. The masks are other
    ones, just as random; they come from torch's own generator, so a run resumes to the bit.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)  # it replaces a kernel: yes
            library.impl("bernoulli_.float", _draw_mask, "CPU")
        yield
    finally:
        library._destroy()


def _draw_mask(
    values: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Set each value to 1 with probability `p`, to the nearest of 65,536 parts, else to 0."""
    if not _RAREST_MASK <= p <= 1 - _RAREST_MASK:
        return values.copy_(torch.rand(values.shape, generator=generator) < p)
    numbers = torch.empty(-(-values.numel() // 4), dtype=torch.int64)
    numbers.random_(-(2**63), None, generator=generator)
    parts = numbers.view(torch.int16)[: values.numel()].view(values.shape)
    return values.copy_(parts < round(p * _MASK_PARTS) - _MASK_PARTS // 2)
