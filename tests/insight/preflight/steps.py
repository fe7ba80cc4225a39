"""Traced steps of a size that one can count by hand."""

from __future__ import annotations

from anytrain.insight.preflight.trace import (
    Held,
    Op,
    Phase,
    SourcePlace,
    TensorFacts,
    Trace,
    TracedJob,
)

MIB = 2**20
WEIGHTS, STATE, SAMPLE = 64 * MIB, 128 * MIB, 16 * MIB


def op(
    name: str,
    phase: Phase = "forward",
    shape: tuple[int, ...] = (1024, 1024),
    dtype: str = "float32",
    calls: int = 1,
    flops: int = 0,
    num_bytes: int = 0,
) -> Op:
    """Return an operation on tensors of one shape."""
    facts = TensorFacts(dtype, shape, "cuda")
    place = SourcePlace()
    return Op(name, phase, place, (facts, facts), (facts,), (), calls, flops, num_bytes)


PRODUCTS = (op("mm"), op("mm", "backward"))


def step(batch_size: int, ops: tuple[Op, ...] = PRODUCTS, **job: object) -> Trace:
    """Return a step that keeps 16 MiB of activations a sample, then frees them."""
    kept = batch_size * SAMPLE
    events = (
        *((0, WEIGHTS), (1, STATE), (2, batch_size * 1024)),
        *((3, kept), (4, WEIGHTS), (3, 0), (4, 0)),
    )
    owners = {
        "parameters": WEIGHTS,
        "optimizer": STATE,
        "batch": batch_size * 1024,
        "activations": kept,
        "gradients": WEIGHTS,
    }
    held = Held(
        peak_bytes=sum(owners.values()),
        by_owner=owners,  # type: ignore[arg-type]
        activations_by_module={"layer": kept},
        timeline=(),
        events=events,
        step=(3, 7),
    )
    return Trace(TracedJob(batch_size=batch_size, **job), ops, held, 0.1)  # type: ignore[arg-type]
