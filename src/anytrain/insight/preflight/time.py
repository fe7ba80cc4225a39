"""Estimate how long a step takes on a device that is not here.

Each operation takes as long as its arithmetic or its memory traffic, whichever is slower, and no
less than a kernel's shortest time. Op by op, a device also waits where the host is slower to issue
operations than it is to run them, and where the host reads a value, both take turns. A recorded or
compiled step has no host in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anytrain.insight.preflight.rates import Rates
from anytrain.insight.preflight.traced import Op, Phase, Trace, num_bytes

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
