"""Which numbers of the run can the target not hold, or hold only slowly?

Apple's GPUs have no float64 at all, and complex numbers in part. TPUs emulate float64.
"""

from __future__ import annotations

from collections.abc import Iterator

from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Op, SourcePlace, TensorFacts, Trace

_WIDE = {"float64": "float32", "complex128": "complex64"}
_COMPLEX = ("complex32", "complex64")
_DECOMPOSITIONS = ("linalg_pinv", "_linalg_svd", "linalg_svd", "_linalg_eigh")


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield each line that makes a number the target has no good type for."""
    if target.kind == "mps":
        yield from _wide(trace, target)
        yield from _partly(trace)
    elif target.kind in ("tpu", "xla"):
        yield from _wide(trace, target)


def _wide(trace: Trace, target: Target) -> Iterator[Finding]:
    seen: dict[SourcePlace, tuple[Op, str, int]] = {}
    decomposed = _decomposed(trace)
    for op in trace.ops:
        dtype = next((t.dtype for t in op.outputs if _is_wide(t, target)), "")
        if dtype and not op.place.is_ours and not _is_tolerance(op, decomposed.get(op.place, 0)):
            line = op.place.line_alone
            first, kind, calls = seen.get(line, (op, dtype, 0))
            seen[line] = (first, kind, calls + (op.calls if op.is_in_step else 0))
    in_forward = any(op.phase != "backward" for op, _, _ in seen.values())
    for op, dtype, calls in seen.values():
        if target.kind != "mps":
            yield _slow(op, dtype, calls, target)
        elif op.phase == "backward" and not in_forward:
            yield _perhaps(op, dtype, calls)
        else:
            yield _refused(op, dtype, calls)


def _is_wide(facts: TensorFacts, target: Target) -> bool:
    # A tensor without elements is a placeholder, whose type torch chooses for the device.
    return facts.dtype in _WIDE and facts.device == target.kind and 0 not in facts.shape


def _decomposed(trace: Trace) -> dict[SourcePlace, int]:
    """Return where float32 matrices are taken apart, and how many dimensions they have at most."""
    found: dict[SourcePlace, int] = {}
    for op in trace.ops:
        if op.name.startswith(_DECOMPOSITIONS) and op.inputs[0].dtype not in _WIDE:
            found[op.place] = max(found.get(op.place, 0), len(op.inputs[0].shape))
    return found


def _is_tolerance(op: Op, num_dims: int) -> bool:
    # LinearAlgebra.cpp: what pinv and matrix_rank compare the singular values of a matrix with is
    # float32 on mps, and float64 elsewhere. It has the values' dimensions, one less than a matrix.
    return all(len(t.shape) < num_dims for t in op.outputs)


def _refused(op: Op, dtype: str, calls: int) -> Finding:
    return Finding(
        "dtypes",
        "error",
        f"{op.name} makes {dtype} on mps, which has none.",
        why="Apple's GPUs have no 64-bit floating point; torch raises a TypeError, and "
        "PYTORCH_ENABLE_MPS_FALLBACK=1 does not help.",
        fix=f"Say dtype=torch.{_WIDE[dtype]} (numpy arrays and Python's own floats are float64 "
        "unless converted), or keep this tensor on the CPU.",
        place=op.place,
        per_step=calls,
    )


def _perhaps(op: Op, dtype: str, calls: int) -> Finding:
    # Derivative formulas accumulate in a type that torch chooses by the device: float64 on the
    # CPU, which stands in for the GPU here, and float32 on mps. They never make float64 otherwise.
    return Finding(
        "dtypes",
        "note",
        f"{op.name} makes {dtype} in backward, and nothing does in forward.",
        why="torch's own derivatives do so on the CPU alone; a backward of your own would fail.",
        fix=f"If this line has a backward of your own, say dtype=torch.{_WIDE[dtype]} in it.",
        place=op.place,
        per_step=calls,
        certain=False,
    )


def _slow(op: Op, dtype: str, calls: int, target: Target) -> Finding:
    return Finding(
        "dtypes",
        "warning",
        f"{op.name} computes in {dtype} on {target.kind}.",
        why="A TPU has no 64-bit floating point units: XLA emulates it, many times slower and in "
        "twice the memory.",
        fix=f"Say dtype=torch.{_WIDE[dtype]}.",
        place=op.place,
        per_step=calls,
    )


def _partly(trace: Trace) -> Iterator[Finding]:
    """Yield one note for each type that mps serves in part."""
    found: dict[str, Op] = {}
    for op in trace.ops:
        for facts in (*op.inputs, *op.outputs):
            if facts.device == "mps" and facts.dtype in (*_COMPLEX, "bfloat16"):
                kind = "bfloat16" if facts.dtype == "bfloat16" else "complex"
                found.setdefault(kind, op)
    if "complex" in found:
        yield Finding(
            "dtypes",
            "note",
            "Complex numbers are served in part on mps.",
            why="Many kernels take complex64, but not all, and no table says which.",
            fix="Compute on real and imaginary parts (torch.view_as_real) where one refuses.",
            place=found["complex"].place,
            certain=False,
        )
    if "bfloat16" in found:
        yield Finding(
            "dtypes",
            "note",
            "bfloat16 on mps needs macOS 14.",
            why="Older systems have no such type in Metal.",
            fix="Train in float32 or fp16 where the Mac is older.",
            place=found["bfloat16"].place,
            certain=False,
        )
