"""Does every parameter that is trained get a gradient?"""

from __future__ import annotations

from collections.abc import Iterator

from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Trace

_NAMED = 4


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield parameters without a gradient: an error where processes wait for each other's."""
    names = trace.job.unused_parameters
    if not names or trace.failure:
        return
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    listed = ", ".join(names[:_NAMED]) + more
    number = f"{len(names)} parameter{'' if len(names) == 1 else 's'}"
    waits = trace.job.world_size > 1 and target.kind != "mps"  # which trains in one process only
    if waits and not trace.job.finds_unused:
        yield Finding(
            "unused",
            "error",
            f"{number} of the model got no gradient: {listed}.",
            why="DistributedDataParallel waits for every gradient, and fails at the second step.",
            fix="Pass find_unused_parameters=True (ddp_find_unused_parameters), call "
            "requires_grad_(False) on them, or take them out of the model.",
            place=trace.job.unused_place,
        )
    else:
        yield Finding(
            "unused",
            "note",
            f"{number} of the model got no gradient: {listed}.",
            why="The loss does not depend on them: they are held in memory and never change. In "
            "several processes this is an error, unless find_unused_parameters is on.",
            fix="Call requires_grad_(False) on them, take them out, or let the loss use them.",
            place=trace.job.unused_place,
        )
