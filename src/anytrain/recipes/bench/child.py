"""The child process of one contender: train, evaluate, measure single steps, write the answer.

    python -m anytrain.recipes.bench.child FOLDER prepare
    python -m anytrain.recipes.bench.child FOLDER NAME SEED BORN

FOLDER holds the settings, and after `prepare` the rows and the weights. BORN is the time when the
parent started this process.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from anytrain.core import environment
from anytrain.machine.backends.base import Backend
from anytrain.recipes.bench import rows
from anytrain.recipes.bench.comparison import CONTENDERS, Contender
from anytrain.recipes.bench.settings import BenchSettings, load
from anytrain.recipes.bench.task import (
    BenchTask,
    OnStep,
    Trained,
    evaluate,
    flops_per_step,
    load_model,
    place,
    write_model,
)

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


_PACKAGES = ("anytrain", "transformers", "accelerate", "lightning", "numpy")


class Child:
    """One contender with its settings, in a process of its own."""

    def __init__(self, folder: Path, contender: Contender, seed: int) -> None:
        self.folder, self.contender, self.seed = folder, contender, seed
        self.settings: BenchSettings = load(folder / "settings.json")
        self.backend, self.device = place(self.settings)
        self.train_rows = rows.load(folder, "train")
        name, _, function = contender.run.partition(":")
        self.run = getattr(import_module(name), function)

    def task(self, num_steps: int, watch: OnStep | None = None) -> BenchTask:
        """Return the training of all rows, over so many steps."""
        return BenchTask(
            settings=self.settings,
            folder=self.folder,
            train=self.train_rows,
            precision=self.contender.precision,
            padding=self.contender.padding,
            seed=self.seed,
            num_steps=num_steps,
            batch_size=self.settings.batch_size,
            length=self.settings.length,
            backend=self.backend,
            device=self.device,
            watch=watch,
        )

    def measure(self, born_s: float) -> dict[str, Any]:
        """Warm up, train all of it, evaluate, and measure single steps."""
        first = FirstStep(born_s, self.backend, self.device)
        if self.settings.warm_up_steps:
            self.run(self.task(self.settings.warm_up_steps, first))
            self._forget()
        task = self.task(self._num_steps())
        trained: Trained = self.run(task)
        peak = self.backend.memory(self.device).peak_bytes
        answer: dict[str, Any] = {
            "precision": trained.precision,
            "seconds": task.seconds,
            "steps": task.num_steps,
            "samples_per_second": self._num_samples() / task.seconds,
            "first_step_s": first.after_s,
            "train_loss": trained.mean_loss,
            "peak_bytes": peak,
            "plan": trained.plan,
            **evaluate(task, trained.model, rows.load(self.folder, "eval")),
        }
        flops = self.flops(trained.model)
        del trained
        if flops:
            rate = matmul_rate(self.backend, self.device)
            answer |= {"matmul_rate": rate, "shapes": [self.steps(s, flops, rate) for s in flops]}
        return answer

    def _num_steps(self) -> int:
        whole = -(-len(self.train_rows) // self.settings.batch_size) * self.settings.epochs
        return min(whole, self.settings.max_steps or whole)

    def _num_samples(self) -> int:
        epoch = -(-len(self.train_rows) // self.settings.batch_size)
        epochs, more = divmod(self._num_steps(), epoch)
        return epochs * len(self.train_rows) + more * self.settings.batch_size

    def flops(self, model: torch.nn.Module) -> dict[tuple[int, int], float]:
        """Return what a step of each shape that is asked for computes."""
        shapes = self.settings.shapes or ()
        return {shape: flops_per_step(model, *shape) for shape in shapes}

    def steps(
        self, shape: tuple[int, int], flops: dict[tuple[int, int], float], rate: float
    ) -> dict[str, Any]:
        """Measure steps whose batches all have one shape."""
        self._forget()
        clock = StepClock(self.settings.shape_steps, self.backend, self.device)
        task = self.task(sum(self.settings.shape_steps), clock)
        task.batch_size, task.length = shape
        task.padding = "max"
        vocabulary = json.loads((self.folder / "config.json").read_text())["vocab_size"]
        count = task.batch_size * task.num_steps
        task.train = rows.filling(self.settings, count, task.length, vocabulary)
        self.run(task)
        idle: dict[str, float] = {}
        if clock.profiled:  # against steps that no profiler slowed down
            idle["idle"] = max(0.0, 1 - clock.profiled["busy_s"] / clock.step_s)
        return {
            "shape": f"{shape[0]}x{shape[1]}",
            "step_s": clock.step_s,
            "cpu_s": clock.cpu_s,
            "samples_per_second": shape[0] / clock.step_s,
            "matmul_share": flops[shape] / clock.step_s / rate,
            **clock.profiled,
            **idle,
        }

    def _forget(self) -> None:
        gc.collect()
        self.backend.release()


def prepare(folder: Path) -> dict[str, Any]:
    """Write rows and weights for all, and return what is known of the machine."""
    settings = load(folder / "settings.json")
    rows.write(settings, folder)
    write_model(settings, folder)
    backend, device = place(settings)
    found = backend.capabilities(device)
    return {
        "device": found.name,
        "backend": found.backend,
        "threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "parameters": _num_parameters(settings, folder),
        "rows": len(rows.load(folder, "train")),
        "variables": environment.relevant(),
    }


def _num_parameters(settings: BenchSettings, folder: Path) -> int:
    return sum(parameter.numel() for parameter in load_model(settings, folder).parameters())


def _version(name: str) -> str:
    if name == "anytrain":
        from anytrain import __version__

        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def main(words: Sequence[str]) -> None:
    """Do what the parent asks, and leave the answer in the folder."""
    folder, name = Path(words[0]), words[1]
    if name == "prepare":
        answer = prepare(folder)
    else:
        answer = Child(folder, CONTENDERS[name], int(words[2])).measure(float(words[3]))
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
