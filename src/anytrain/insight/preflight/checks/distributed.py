"""Can the run have as many processes as it asks for?"""

from __future__ import annotations

from collections.abc import Iterator

from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Trace


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield an error for several processes on a device that has no transport between them."""
    size = trace.job.world_size
    if target.kind == "mps" and size > 1:
        yield Finding(
            "distributed",
            "error",
            f"{size} processes cannot train together on mps.",
            why="Neither gloo nor nccl serves mps: a Mac has one GPU, for one process.",
            fix=f"Start one process, and keep the batch with gradient_accumulation_steps="
            f"{size * max(trace.job.accumulation, 1)}.",
        )
