"""Estimate how long a step takes on a device that is not here, and how fast devices are.

Each operation takes as long as its arithmetic or its memory traffic, whichever is slower, and no
less than a kernel's shortest time. Op by op, a device also waits where the host is slower to issue
operations than it is to run them, and where the host reads a value, both take turns. A recorded or
compiled step has no host in it.

Rates are dense, without sparsity, from the makers' data sheets. Apple prints none for its GPUs:
theirs follow from cores x 256 operations x clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Op, Phase, Trace, num_bytes

TERA, GIGA = 1e12, 1e9
# Which chip stands for a target that says its memory alone: up to so many GB, this one.
_BY_MEMORY: dict[str, tuple[tuple[float, str], ...]] = {
    "cuda": ((17, "t4"), (25, "rtx3090"), (49, "l40s"), (82, "a100"), (145, "h200")),
    "mps": ((25, "m2"), (37, "m3pro"), (129, "m3max"), (1e9, "m3ultra")),
    "tpu": ((17, "v5e"), (33, "v4"), (1e9, "v5p")),
}
_VIEWS = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "view_as", "as_strided", "alias"),
        *("t", "transpose", "permute", "movedim", "expand", "slice", "select", "diagonal"),
        *("unsqueeze", "squeeze", "unfold", "split", "split_with_sizes", "chunk", "unbind"),
        *("detach", "lift_fresh", "set_", "_local_scalar_dense"),
        *("empty", "empty_like", "empty_strided", "new_empty"),
    )
)
"""What starts no kernel."""
_READS_ROWS = frozenset(("embedding", "index_select", "gather", "index", "_embedding_bag"))
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Rates:
    """What one device does in a second, and what a call of one operation costs."""

    name: str
    flops: dict[str, float]
    """The most operations a second by dtype; "tensor32" is float32 rounded to TF32."""
    bytes_per_s: float
    matmul_share: float = 0.6
    """What matrix products of a usual size reach of it."""
    copy_share: float = 0.75
    kernel_s: float = 2.5e-6
    """The shortest time between two kernels."""
    host_op_s: float = 30e-6
    """What Python, autograd and torch need to issue one operation: 37 ms for the thousand or so
    of a BERT-base step in bf16, measured beside an H200; 0 where steps are compiled whole."""
    because: str = "the maker's data sheet"


def _gpu(name: str, half: float, tensor32: float, single: float, bandwidth: float) -> Rates:
    """Return a GPU's rates, given in TFLOP/s and GB/s."""
    flops = {
        "bfloat16": half * TERA,
        "float16": half * TERA,
        "tensor32": tensor32 * TERA,
        "float32": single * TERA,
    }
    return Rates(name, flops, bandwidth * GIGA)


def _older_gpu(name: str, half: float, single: float, bandwidth: float) -> Rates:
    """Return the rates of a GPU whose matrix units know neither bfloat16 nor TF32."""
    found = _gpu(name, half, single, single, bandwidth)
    return replace(found, flops={**found.flops, "bfloat16": single * TERA})


def _apple(name: str, cores: int, clock_ghz: float, bandwidth: float) -> Rates:
    single = cores * 256 * clock_ghz * GIGA
    flops = dict.fromkeys(("float32", "float16", "bfloat16", "tensor32"), single)
    why = f"{cores} GPU cores x 256 operations x {clock_ghz} GHz; the largest version of the chip"
    return Rates(
        name, flops, bandwidth * GIGA, copy_share=0.8, kernel_s=8e-6, host_op_s=25e-6, because=why
    )


def _tpu(name: str, half: float, bandwidth: float) -> Rates:
    # float32 products run as one bfloat16 pass unless more precision is asked for.
    flops = dict.fromkeys(("bfloat16", "float16", "float32", "tensor32"), half * TERA)
    return Rates(name, flops, bandwidth * GIGA, matmul_share=0.5, kernel_s=0.0, host_op_s=0.0)


RATES: dict[str, Rates] = {
    "t4": replace(_older_gpu("T4", 65, 8.1, 320), matmul_share=0.45),
    "v100": _older_gpu("V100", 125, 15.7, 900),
    "v100-32gb": _older_gpu("V100 32 GB", 125, 15.7, 900),
    "a10": _gpu("A10", 125, 62.5, 31.2, 600),
    "a10g": _gpu("A10G", 70, 35, 35, 600),
    "l4": _gpu("L4", 121, 60, 30.3, 300),
    "rtx3090": _gpu("RTX 3090", 71, 35.6, 35.6, 936),
    "rtx4090": _gpu("RTX 4090", 165, 82.6, 82.6, 1008),
    "rtx5090": _gpu("RTX 5090", 209, 104.8, 104.8, 1792),
    "a100-40gb": _gpu("A100 40 GB", 312, 156, 19.5, 1555),
    "l40s": _gpu("L40S", 362, 183, 91.6, 864),
    "a100": _gpu("A100 80 GB", 312, 156, 19.5, 2039),
    "h100": _gpu("H100 SXM", 989, 494, 67, 3350),
    "h200": _gpu("H200", 989, 494, 67, 4800),
    "b200": _gpu("B200", 2250, 1125, 75, 8000),
    "m1": _apple("M1", 8, 1.278, 68),
    "m1pro": _apple("M1 Pro", 16, 1.296, 200),
    "m1max": _apple("M1 Max", 32, 1.296, 400),
    "m1ultra": _apple("M1 Ultra", 64, 1.296, 800),
    "m2": _apple("M2", 10, 1.398, 100),
    "m2pro": _apple("M2 Pro", 19, 1.398, 200),
    "m2max": _apple("M2 Max", 38, 1.398, 400),
    "m2ultra": _apple("M2 Ultra", 76, 1.398, 800),
    "m3": _apple("M3", 10, 1.38, 100),
    "m3pro": _apple("M3 Pro", 18, 1.38, 150),
    "m3max": _apple("M3 Max", 40, 1.38, 400),
    "m3ultra": _apple("M3 Ultra", 80, 1.38, 819),
    "m4": _apple("M4", 10, 1.58, 120),
    "m4pro": _apple("M4 Pro", 20, 1.58, 273),
    "m4max": _apple("M4 Max", 40, 1.58, 546),
    "m5": _apple("M5", 10, 1.62, 153),
    "v4": _tpu("TPU v4", 275, 1228),
    "v5e": _tpu("TPU v5e", 197, 819),
    "v5p": _tpu("TPU v5p", 459, 2765),
    "v6e": _tpu("TPU v6e", 918, 1640),
}
"""By the names of targets.CHIPS."""


def rates_of(target: Target) -> Rates | None:
    """Return the rates of a target's chip, or of a usual one with its memory; None if unknown.

    >>> rates_of(Target("cuda", "cuda:24GB", 24 * 2**30, "2.13")).because
    'taken for an RTX 3090, a usual one with this memory'
    """
    if target.chip:
        return RATES.get(target.chip)
    whole = target.memory_bytes
    for most, chip in _BY_MEMORY.get(target.kind, ()):
        if whole is not None and whole <= most * 2**30:
            found = RATES[chip]
            article = "an" if found.name[0] in "AHLMR8" else "a"
            told = f"taken for {article} {found.name}, a usual one with this memory"
            return replace(found, because=told)
    return None


def measured(backend: Any, device: Any, seconds: float = 0.4) -> Rates:
    """Measure this machine's own device: matrix products, copies, and a call of nearly nothing."""
    import torch

    on_host = device.type == "cpu"
    size, length = (768, 2**22) if on_host else (4096, 2**26)
    part = seconds / 4

    def rate(work: Callable[[], Any], amount: float) -> float:
        return amount / _best(work, lambda: backend.synchronize(device), part)

    with torch.inference_mode():
        flops = {}
        for dtype in ("float32", "bfloat16"):
            square = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
            flops[dtype] = rate(lambda s=square: s @ s, 2.0 * size**3)  # type: ignore[misc]
        long = torch.zeros(length, device=device)
        target = torch.empty_like(long)
        speed = rate(lambda: target.copy_(long), 8.0 * length)
        one = torch.zeros(1, device=device)
        call_s = 1 / rate(lambda: _many(one), 100.0)
    known = {**flops, "float16": flops["bfloat16"], "tensor32": flops["float32"]}
    return Rates(
        f"this {device.type}",
        known,
        speed,
        matmul_share=0.85,
        copy_share=0.9,
        kernel_s=call_s if on_host else 2.5e-6,
        host_op_s=0.0 if on_host else max(3 * call_s, 15e-6),
        because="measured here by a short benchmark",
    )


def _many(one: Any) -> None:
    for _ in range(100):
        one.add_(1)


def _best(work: Callable[[], Any], wait: Callable[[], None], seconds: float) -> float:
    """Return the shortest time of the work: the least disturbed one."""
    work()
    wait()
    best, begin, rounds = float("inf"), time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - start)
        rounds += 1
    return best


# -- the time of a step ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Duration:
    """An estimate of one training step's time, with all that it assumes."""

    step_s: float
    device_s: float
    """What the device needs, were it never kept waiting."""
    host_s: float
    """What the host needs to issue the operations; 0 where it issues none."""
    by_phase: dict[Phase, float]
    """The device's time."""
    flops: int
    bytes: int
    num_kernels: int
    samples_per_s: float
    assumption: str

    @property
    def is_host_bound(self) -> bool:
        """Whether the device waits for the host."""
        return self.host_s > self.device_s


def estimate(
    trace: Trace, rates: Rates, *, is_recorded: bool = False, allows_tf32: bool = False
) -> Duration:
    """Return how long a training step should take at these rates; roughly, and labelled so."""
    flops = moved = kernels = 0
    seconds: dict[Phase, float] = {}
    for op in trace.ops:
        if not op.is_in_step or _is_view(op):
            continue
        seconds[op.phase] = seconds.get(op.phase, 0.0) + _seconds(op, rates, allows_tf32)
        flops, moved, kernels = flops + op.flops, moved + _traffic(op), kernels + op.calls
    host = 0.0 if is_recorded else rates.host_op_s * _num_issued(trace.ops)
    device = sum(seconds.values())
    waits = sum(op.calls for op in trace.ops if op.host_read and op.is_in_step)
    step = device + host if waits > 1 else max(device, host)
    samples = trace.job.batch_size * trace.job.accumulation
    return Duration(
        step_s=step,
        device_s=device,
        host_s=host,
        by_phase=seconds,
        flops=flops,
        bytes=moved,
        num_kernels=kernels,
        samples_per_s=samples / step if step else 0.0,
        assumption=_assumption(rates, is_recorded=is_recorded),
    )


def _assumption(rates: Rates, *, is_recorded: bool) -> str:
    how = "a recorded step" if is_recorded else "a step run op by op"
    if not rates.host_op_s:
        how = "a step"
    return (
        f"An estimate: {how} on {rates.name} ({rates.because}), with products at "
        f"{rates.matmul_share:.0%} and memory at {rates.copy_share:.0%} of those rates; data "
        "are there in time."
    )


def _num_issued(ops: Iterable[Op]) -> int:
    """Return how many operations the host issues: views cost it time too, though little."""
    return sum(op.calls // 4 if _is_view(op) else op.calls for op in ops if op.is_in_step)


def _is_view(op: Op) -> bool:
    return _plain(op) in _VIEWS


def _plain(op: Op) -> str:
    return op.name.split(".")[0]


def _seconds(op: Op, rates: Rates, allows_tf32: bool) -> float:
    """Return the time of all calls of an operation."""
    peak = rates.flops.get(_kind(op, allows_tf32), rates.flops["float32"])
    computing = op.flops / (peak * rates.matmul_share)
    moving = _traffic(op) / (rates.bytes_per_s * rates.copy_share)
    return max(computing, moving, rates.kernel_s * op.calls)


def _kind(op: Op, allows_tf32: bool) -> str:
    """Return the dtype whose rate holds: torch lets cuDNN, not cuBLAS, round float32 to TF32."""
    dtypes = {t.dtype for t in op.inputs}
    half = next((dtype for dtype in _HALVES if dtype in dtypes), None)
    if half is not None:
        return half
    return "tensor32" if allows_tf32 or "convolution" in op.name else "float32"


def _traffic(op: Op) -> int:
    """Return the bytes of all calls; of a look-up the rows alone, not the whole table."""
    if _plain(op) in _READS_ROWS:
        return 2 * op.calls * sum(num_bytes(t) for t in op.outputs)
    return op.bytes
