"""Will gradients survive the number format?"""

from __future__ import annotations

from collections.abc import Iterator

from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import SourcePlace, Trace

_WITHOUT_BF16 = ("t4", "v100", "v100-32gb")
"""GPUs from before bfloat16 had units of its own (compute capability 8.0)."""


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield a warning for bfloat16 where no unit computes it, an error for unscaled float16."""
    if target.chip in _WITHOUT_BF16 and trace.job.precision == "bf16":
        yield Finding(
            "precision",
            "warning",
            f"A {target.chip.upper()} has no units for bfloat16.",
            why="torch computes it there all the same, as slowly as float32 or more so.",
            fix="Use mixed_precision='fp16' on this GPU, which brings loss scaling with it.",
        )
    yield from _unscaled(trace)


def _unscaled(trace: Trace) -> Iterator[Finding]:
    job = trace.job
    if job.scales_gradients or not job.num_trainable:
        return
    place = _first_half_gradient(trace)
    if job.precision != "fp16" and place is None:
        return
    yield Finding(
        "precision",
        "error",
        "Gradients are computed in float16, and the loss is not scaled.",
        why="Gradients below 6e-8 become zero in float16, which most of a network's are after a "
        "while: it stops learning, without an error.",
        fix="Use bfloat16, which needs no scaling; or torch.amp.GradScaler, which "
        "mixed_precision='fp16' brings with it.",
        place=place,
    )


def _first_half_gradient(trace: Trace) -> SourcePlace | None:
    """Return where a gradient is first computed in float16; None where none is."""
    for op in trace.ops:
        if op.phase == "backward" and any(out.dtype == "float16" for out in op.outputs):
            return op.place
    return None
