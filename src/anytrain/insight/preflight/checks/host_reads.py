"""Where does the host wait for the device in a step?

A value that is read (`.item()`, `.tolist()`, a mask that selects, `nonzero`) has to be computed
first. A CUDA graph cannot hold such a wait; a TPU's graph ends at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from anytrain.insight.preflight.findings import Finding, Severity
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Op, SourcePlace, Trace

_IN_A_STEP = ("forward", "backward", "clip", "optimizer")
_READS = {
    "item": "A single value is read (.item(), float(), or a tensor in an `if`)",
    "to cpu": "A tensor is copied to the host (.tolist(), .cpu(), .numpy())",
    "nonzero": "The number of hits decides a shape (nonzero)",
    "boolean mask": "The number of hits decides a shape (a boolean mask)",
    "unique": "The number of different values decides a shape (unique)",
    "bincount": "The largest value decides a shape (bincount)",
    "equal": "Two tensors are compared as a whole (torch.equal)",
    "print": "A tensor is printed, or put into a text",
    "success": "Whether the operation worked is read back (torch.linalg)",
    "range": "The least and the largest value are read back (histc without min and max)",
}
_WHY = {
    "cuda": "The device has to finish before the host goes on, and a step with such a wait cannot "
    "be recorded as a CUDA graph: it runs op by op.",
    "mps": "The host waits until the GPU has done everything before it.",
    "tpu": "The graph of the step is cut here: what came before is compiled, run and waited for, "
    "and the rest is a graph of its own.",
}
_WHY["xla"] = _WHY["tpu"]
_FIX = {
    "item": "Keep the value on the device (torch.where instead of `if`), or read it every so many "
    "steps, outside of the model.",
    "to cpu": "Keep it on the device until the step is over, or read it every so many steps.",
    "unique": "Keep the shape: pass the number of classes instead (minlength=, num_classes=).",
    "boolean mask": "Keep the shape: multiply by the mask, torch.where(mask, x, 0), or a loss with "
    "ignore_index and reduction='sum', divided by mask.sum().",
}
_FIX["success"] = (
    "Take the variant that ends in _ex (inv_ex, cholesky_ex, solve_ex), which does not look; the "
    "decompositions have none: keep them out of the step, or let it run op by op."
)
_FIX["range"] = "Pass min= and max=."
_MASKS = "transformers/masking_utils.py"
_WHY_OF_MASKS = (
    "transformers looks whether an attention mask hides anything. Only steps that run op by op do "
    "so: a recorded step leaves it out."
)
_FIX["nonzero"] = _FIX["boolean mask"]
_FIX["bincount"] = _FIX["unique"]


@dataclass(slots=True)
class _Met:
    """A line that reads."""

    first: Op
    calls: int = 0
    changes_shape: bool = False


def is_left_out(op: Op, target: Target) -> bool:
    """Whether a recorded step does without this read (see fast/shortcuts/attention.py)."""
    return target.kind == "cuda" and op.place.file.replace("\\", "/").endswith(_MASKS)


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield each line of a step at which the host waits."""
    if target.kind == "cpu":
        return
    met: dict[tuple[SourcePlace, bool], _Met] = {}
    for op in trace.ops:
        if op.host_read and not op.place.is_ours and op.phase in (*_IN_A_STEP, "evaluate"):
            key = (op.place.line_alone, op.phase == "evaluate")
            line = met.setdefault(key, _Met(op))
            line.calls += op.calls
            line.changes_shape |= op.is_dynamic
    for (place, is_evaluation), line in met.items():
        if not (is_evaluation and (place, False) in met):
            yield _finding(line, target, is_evaluation)


def _finding(line: _Met, target: Target, is_evaluation: bool) -> Finding:
    read = line.first.host_read
    severity: Severity = "note" if is_evaluation or target.kind == "mps" else "warning"
    step = "an evaluation step" if is_evaluation else "a training step"
    why = f"{_READS[read]}. {_WHY[target.kind]}"
    fix = _FIX.get(read, _FIX["to cpu"])
    if is_left_out(line.first, target):
        severity, why, fix = "note", _WHY_OF_MASKS, "Nothing is to be done."
    if line.changes_shape and target.kind in ("tpu", "xla"):
        why += " The result has another shape whenever the values are others, and each new shape "
        why += "is compiled."
    return Finding(
        "host_reads",
        severity,
        f"The host waits for the device in {step}.",
        why=why,
        fix=fix,
        place=line.first.place,
        per_step=0 if is_evaluation else line.calls,
    )
