"""Measure single steps of one shape: time, share of the matmul rate, idle device, host waits."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anytrain.machine.backends.base import Backend

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuCtxSynchronize",
)
_MADE_UP = 20e9
"""Operations a second: a processor that computes in bfloat16 does far more."""
_LAUNCHES = ("launch", "memcpyasync", "memsetasync")


@dataclass
class FirstStep:
    """Note when the process has done its first step; the clock began with its parent."""

    born_s: float
    backend: Backend
    device: torch.device
    after_s: float | None = None

    def __call__(self) -> None:
        """Wait for the first step and note the time."""
        if self.after_s is None:
            self.backend.synchronize(self.device)
            self.after_s = time.time() - self.born_s


@dataclass
class StepClock:
    """Time some steps in the middle of a run, then look at some more with the profiler."""

    plan: Sequence[int]
    """Steps before, steps timed, steps under the profiler."""
    backend: Backend
    device: torch.device
    done: int = 0
    began: tuple[float, float] = (0.0, 0.0)
    step_s: float = 0.0
    cpu_s: float = 0.0
    profiled: dict[str, float] = field(default_factory=dict)
    _profiler: Any = None

    def __call__(self) -> None:
        """Count a step; at the borders, wait for the device and look at the clocks."""
        before, timed, looked_at = self.plan
        self.done += 1
        if self.done == before:
            self.backend.synchronize(self.device)
            self.began = time.perf_counter(), time.process_time()
        elif self.done == before + timed:
            self.backend.synchronize(self.device)
            self.step_s = (time.perf_counter() - self.began[0]) / timed
            self.cpu_s = (time.process_time() - self.began[1]) / timed
            if self.device.type == "cuda" and looked_at:
                activities = [torch.profiler.ProfilerActivity.CUDA]
                self._profiler = torch.profiler.profile(activities=activities)
                self._profiler.start()
        elif self.done == before + timed + looked_at and self._profiler is not None:
            self._profiler.stop()
            self.profiled = _read(self._profiler, looked_at)
            self._profiler = None


def _read(profiler: Any, num_steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return summarise(events, num_steps)


def summarise(events: Iterable[Mapping[str, Any]], num_steps: int) -> dict[str, float]:
    """Return busy time, idle share and host waits of a profiler's events; none without work.

    Waits after the last launch belong to the end of the profile, not to a step.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    work = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in whole
        if e.get("cat") in _DEVICE_WORK
    )
    if not work:
        return {}
    calls = [(float(e["ts"]), str(e["name"])) for e in whole if e.get("cat") in _CALLS]
    launches = [at for at, name in calls if any(word in name.lower() for word in _LAUNCHES)]
    last = max(launches, default=float("inf"))
    waits = sum(at <= last and name.split("_v")[0] in _WAITS for at, name in calls)
    busy, wall = covered(work), max(end for _, end in work) - work[0][0]
    return {
        "busy_s": busy / 1e6 / num_steps,
        "profiled_step_s": wall / 1e6 / num_steps,
        "profiled_idle": 1 - busy / wall if wall else 0.0,
        "kernels": len(work) / num_steps,
        "host_waits": float(waits),
        "profiled_steps": float(num_steps),
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how much of the line is covered by intervals that are sorted by their begin.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in intervals:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def matmul_rate(backend: Backend, device: torch.device) -> float:
    """Return the best rate of a large bfloat16 product here, in operations a second."""
    if device.type == "cuda":
        return _rate(8192, 10, backend, device)
    small = _rate(256, 1, backend, device)  # a processor that makes bfloat16 up takes seconds
    return small if small < _MADE_UP else _rate(1024, 1, backend, device)


def _rate(side: int, often: int, backend: Backend, device: torch.device) -> float:
    left = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    right = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(6):
        backend.synchronize(device)
        began = time.perf_counter()
        for _ in range(often):
            torch.mm(left, right)
        backend.synchronize(device)
        best = min(best, (time.perf_counter() - began) / often)
    return 2 * side**3 / best
