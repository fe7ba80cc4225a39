"""How many shapes will the device see, and what does each cost?

A TPU compiles a graph for every shape, a CUDA graph is recorded for every shape, and Apple's
driver keeps memory for every shape. The samples' own lengths tell how many there will be.
"""

from __future__ import annotations

from collections.abc import Iterator

from anytrain.insight.preflight.checks.host_reads import is_left_out
from anytrain.insight.preflight.findings import Finding, Severity
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Op, Trace, TracedJob

_PHASES = ("forward", "backward", "clip", "optimizer")
# More shapes than this in one pass cost more than the padding that they save.
_MANY = {"tpu": 8, "xla": 8, "cuda": 16, "mps": 32}
_EACH = {
    "tpu": "each is compiled, which takes from seconds to minutes",
    "cuda": "each is recorded as a CUDA graph, with memory of its own",
    "mps": "Apple's driver keeps memory for each, and does not give it back",
}
_EACH["xla"] = _EACH["tpu"]
_SEED = 0


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield results whose shape depends on values, and a data set with too many shapes."""
    if target.kind not in _EACH:
        return
    yield from _dynamic(trace, target)
    if trace.job.lengths and trace.job.batch_size:
        yield from _counted(trace.job, target)


def _dynamic(trace: Trace, target: Target) -> Iterator[Finding]:
    ops = [op for op in trace.ops if op.phase in _PHASES]
    if target.kind == "cuda" and any(op.host_read and not is_left_out(op, target) for op in ops):
        return  # the host waits, so nothing is recorded: a shape costs nothing more
    lines: dict[tuple[str, int], list[Op]] = {}
    for op in ops:
        if op.is_dynamic and not op.host_read:
            lines.setdefault((op.place.file, op.place.line), []).append(op)
    for met in lines.values():
        yield Finding(
            "shapes",
            "warning",
            f"The result of {met[0].name} has a shape that depends on values.",
            why=f"Every new shape counts: {_EACH[target.kind]}.",
            fix="Keep the shape: mask with torch.where, or pad to a length known beforehand.",
            place=met[0].place,
            per_step=sum(op.calls for op in met),
        )


def _counted(job: TracedJob, target: Target) -> Iterator[Finding]:
    now = num_shapes(job)
    if now <= 1:
        return
    governed, waste = num_governed(job)
    is_governed = job.buckets not in ("", "off")
    many = not is_governed and now > _MANY[target.kind]
    severity: Severity = "warning" if many else "note"
    if is_governed:
        told = f"{governed} with length_buckets, {now} without"
        fix = "Nothing to do: length_buckets bounds them."
    else:
        told = f"{now}; with length_buckets='auto' it would be {governed}"
        fix = (
            f"Pass length_buckets='auto' ({governed} shapes, {waste:.0%} padding), or pad to one "
            "length."
        )
    yield Finding(
        "shapes",
        severity,
        f"Shapes of batches in one pass over the data: {told}.",
        why=f"The samples have from {min(job.lengths)} to {max(job.lengths)} tokens, and "
        f"{_EACH[target.kind]}.",
        fix=fix,
        place=job.loader_place,
    )


def num_shapes(job: TracedJob) -> int:
    """Return how many shapes one shuffled pass makes, where a batch is as long as its longest."""
    import numpy as np

    lengths = np.asarray(job.lengths)
    size = job.batch_size
    mixed = np.random.default_rng(_SEED).permutation(lengths)
    whole = mixed[: len(mixed) // size * size].reshape(-1, size)
    found = {(size, int(longest)) for longest in whole.max(axis=1, initial=0)}
    rest = mixed[len(whole) * size :]
    if len(rest):
        found.add((len(rest), int(rest.max())))
    return len(found)


def num_governed(job: TracedJob) -> tuple[int, float]:
    """Return how many shapes a few lengths leave of them, and which share is padding then."""
    from anytrain.engine.data.buckets import Bucketed, choose

    asked = [int(word) for word in job.buckets.replace(",", " ").split() if word.isdecimal()]
    buckets = tuple(asked) if len(asked) > 1 else choose(job.lengths, *asked)
    sampler = Bucketed(job.lengths, buckets, job.batch_size)
    made = sampler.padded()
    starts = range(0, len(made), job.batch_size)
    shapes = {(min(job.batch_size, len(made) - at), int(made[at])) for at in starts}
    return len(shapes), float(1 - sum(job.lengths) / made.sum())
