"""Can the loader's workers be started there?"""

from __future__ import annotations

from collections.abc import Iterator

from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Trace


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield a data set or collator that cannot be handed to a new process."""
    job = trace.job
    if not job.worker_trouble or not job.loader_workers:
        return
    on_mac = target.kind == "mps"
    yield Finding(
        "workers",
        "error" if on_mac else "note",
        f"The loader's {job.loader_workers} workers cannot be given their work: "
        f"{job.worker_trouble}.",
        why="On macOS a worker is a new process, to which data set and collator are pickled."
        if on_mac
        else "Workers that begin as a copy of the process need no pickling; on macOS and Windows, "
        "and with Python 3.14 on Linux, they begin anew, and it fails.",
        fix="Define the data set, the collator and what they use at the top of a module: no "
        "lambda, no function in a function, no open file; or pass num_workers=0.",
        place=job.loader_place,
        certain=on_mac,
    )
