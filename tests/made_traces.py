"""Traces made by hand, for tests that ask one question."""

from __future__ import annotations

from typing import Any

from anytrain.insight.preflight.targets import Target, parse_target
from anytrain.insight.preflight.trace import (
    Held,
    Moment,
    Op,
    SourcePlace,
    TensorFacts,
    Trace,
    TracedJob,
)

MPS, CUDA, TPU, CPU = (parse_target(w) for w in ("mps:16GB", "cuda:24GB", "tpu:v5e", "cpu"))
LINE = SourcePlace("encoder.layer.0", "train.py", 12, "forward", "if loss.item() > 0:")


def op(name: str = "add.Tensor", **changed: Any) -> Op:
    fact = TensorFacts(changed.pop("dtype", "float32"), (2, 3), "mps")
    given: dict[str, Any] = {
        "phase": "forward",
        "place": LINE,
        "inputs": (fact,),
        "outputs": (fact,),
        "settings": (),
        "calls": 1,
        "flops": 6,
        "bytes": 48,
    }
    return Op(name, **{**given, **changed})


def trace(
    *ops: Op, failure: str = "", failure_place: SourcePlace | None = None, **job: Any
) -> Trace:
    timeline = tuple(Moment(n, "forward", "encoder", 2**20 * n) for n in range(1, 6))
    held = Held(
        5 * 2**20,
        {"parameters": 2**20, "activations": 4 * 2**20},
        {"encoder": 4 * 2**20},
        timeline,
    )
    told = TracedJob(**{"num_parameters": 100, "num_trainable": 100, "batch_size": 8, **job})
    return Trace(told, ops, held, 0.5, failure=failure, failure_place=failure_place)


__all__ = ["CPU", "CUDA", "LINE", "MPS", "TPU", "Target", "op", "trace"]
