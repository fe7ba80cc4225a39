"""Are the random numbers of a block that is computed again the same ones?"""

from __future__ import annotations

from collections.abc import Iterator

from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Trace


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield draws inside of checkpointed blocks, where the device's generator is not put back."""
    if target.kind != "mps":
        return
    places = {(place.file, place.line): place for place in trace.job.draws_in_checkpointed}
    for place in places.values():
        yield Finding(
            "randomness",
            "error",
            "Random numbers are drawn inside of a checkpointed block.",
            why="torch.utils.checkpoint keeps the state of the CPU's and of CUDA's generators, and "
            "not that of mps: the block that is computed again in backward draws another dropout, "
            "and the gradients are wrong, without an error.",
            fix="Set the dropout inside of checkpointed blocks to 0, or train without "
            "gradient checkpointing on mps.",
            place=place,
        )
