"""The CPU: always there, and the reference the other backends are held to."""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from anytrain.core.errors import BadInput
from anytrain.core.facts import Capabilities, Found, MemoryUse, NotFound
from anytrain.core.plan import Wishes
from anytrain.machine.backends import cores, trial
from anytrain.machine.backends.cores import num_cores
from anytrain.machine.processes import host_limits

# Processes may share cores, so the count of cores is no limit; past this one it is a mistake.
_MOST_PROCESSES = 64


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
        cores.settle_threads()
        return torch.device("cpu")

    def capabilities(self, device: torch.device) -> Capabilities:
        """Return what the CPU computes in, and the memory this process may use."""
        # No scaler: fp16 is slower than float32 on a CPU, and bfloat16 needs none. No fused
        # optimizer: reading a flag here waits for nothing, so the host decides.
        return Capabilities(
            backend=self.name,
            device=str(device),
            name=processor(),
            dtypes=trial.working_dtypes(device),
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
        """Return True: the CPU does nothing behind the host's back."""
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
            f"Out of host memory: {trial.first_line(error)}\n"
            f"This process holds {(use.used_bytes or 0) / gib:.1f} GiB of "
            f"{(use.total_bytes or 0) / gib:.1f} GiB that it may use.\n"
            "Try a smaller batch with more gradient accumulation steps, or fewer loader workers."
        )

    def release(self) -> None:
        """Collect what nothing refers to any more."""
        gc.collect()

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """Return the state of torch's CPU generator."""
        return torch.get_rng_state()

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        """Set the state of torch's CPU generator."""
        torch.set_rng_state(state)

    def compilations(self) -> int | None:
        """Return None: nothing compiles."""
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
