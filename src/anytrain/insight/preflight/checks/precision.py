"""Will gradients survive the number format?"""

from __future__ import annotations

from collections.abc import Iterator

from anytrain.insight.preflight.findings import Finding, Place
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.traced import Trace


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield an error for float16 without loss scaling."""
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


def _first_half_gradient(trace: Trace) -> Place | None:
    """Return where a gradient is first computed in float16; None where none is."""
    for op in trace.ops:
        if op.phase == "backward" and any(out.dtype == "float16" for out in op.outputs):
            return op.place
    return None
