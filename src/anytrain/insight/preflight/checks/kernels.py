"""Which operations of the run have no kernel on Apple's GPUs?

What reaches the device in a traced step is looked up in the table of the target's torch version.
An operation without a kernel raises, unless PYTORCH_ENABLE_MPS_FALLBACK=1 was set before torch was
loaded: then it is run on the CPU, at the price of copies there and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from anytrain.insight.preflight.findings import Finding, Severity
from anytrain.insight.preflight.mps.conditions import Condition, advice, failing
from anytrain.insight.preflight.mps.kernels import KernelTable, Status, kernel_table
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Op, SourcePlace, Trace

_FLAG = "PYTORCH_ENABLE_MPS_FALLBACK=1"
_WIDE = ("float64", "complex128")
# A function that asks for the device before it chooses a kernel has chosen for the machine that
# traces: these names are never met on mps, where it chooses another one.
_OTHERS = frozenset(
    {"cpu", "cuda", "cudnn", "miopen", "mkldnn", "mkl", "xpu", "flash", "efficient"}
)


@dataclass(slots=True)
class _Met:
    """Calls that are alike: the same operation at the same line."""

    op: Op
    name: str
    """The operation that is looked up, which the traced one may hide."""
    calls: int = 0
    """In a training step."""
    evaluated: int = 0
    """In an evaluation step."""

    def met(self, op: Op) -> None:
        if op.is_in_step:
            self.calls += op.calls
        elif op.phase == "evaluate":
            self.evaluated += op.calls


def check(trace: Trace, target: Target) -> Iterator[Finding]:
    """Yield what has no kernel, what goes to the CPU, and what may fail for its shapes."""
    if target.kind != "mps":
        return
    table = kernel_table(target.torch_version)
    missing: dict[tuple[str, SourcePlace], _Met] = {}
    doubtful: dict[tuple[Condition, str, SourcePlace], _Met] = {}
    for op in trace.ops:
        if not _is_on_mps(op):
            continue
        name, line = _hidden(op, table), op.place.line_alone
        if _status(name, table) in ("missing", "sent to the cpu"):
            missing.setdefault((name, line), _Met(op, name)).met(op)
            continue
        for condition in failing(op):
            key = (condition, name, line)
            doubtful.setdefault(key, _Met(op, name)).met(op)
    for met in missing.values():
        yield _without_kernel(met, table, trace.job.mps_fallback)
    for (condition, _, _), met in doubtful.items():
        yield _may_fail(met, condition)


def _is_on_mps(op: Op) -> bool:
    return any(t.device == "mps" for t in (*op.inputs, *op.outputs))


def _hidden(op: Op, table: KernelTable) -> str:
    """Return the operation that decides, where one is computed with another inside of C++."""
    if not op.name.startswith("linalg_pinv."):
        return op.name
    # It takes a matrix apart by its eigenvalues if told that it is symmetric, else by linalg_svd.
    if dict(op.settings).get("hermitian"):
        return "_linalg_eigh"
    return "linalg_svd" if "linalg_svd" in table.cpu_fallback else "_linalg_svd"


def _status(name: str, table: KernelTable) -> Status:
    if _OTHERS & set(name.partition(".")[0].split("_")):
        return "composite"
    return table.status(name)


def _without_kernel(met: _Met, table: KernelTable, fallback: bool) -> Finding:
    shown = met.op.name if met.name == met.op.name else f"{met.name} (in {met.op.name})"
    is_sent = table.status(met.name) == "sent to the cpu"
    lost = "" if is_sent else _not_rescued(met, table)
    severity: Severity = "error"
    if is_sent:
        severity, what = "warning", f"{shown} runs on the CPU."
        why = f"torch {table.torch} has no kernel for it on mps and computes it on the CPU."
    else:
        what = f"{shown} has no kernel on mps."
        why = f"torch {table.torch} has none{_because(met.name, table)}"
        why += "" if met.op.phase == "forward" else f"; it is met in {met.op.phase}"
        why += (
            f". {lost}" if lost else f". {_FLAG}, set before torch is loaded, sends it to the CPU"
        )
        if fallback and not lost:
            severity, why = "warning", why + ", and this run sets it"
        why += "" if lost else "."
    return Finding(
        "kernels",
        severity,
        what,
        why=why if lost else f"{why} {_price(met)}",
        fix=_fix(met, runs=severity == "warning", flag_helps=not lost),
        place=met.op.place,
        per_step=met.calls,
    )


def _because(name: str, table: KernelTable) -> str:
    through = table.through.get(name)
    return f", as it is written with {through}, which has none" if through else ""


def _not_rescued(met: _Met, table: KernelTable) -> str:
    """Return why the fallback to the CPU would not help; empty where it would."""
    if table.through.get(met.name, met.name) in table.not_on_cpu:
        return f"{_FLAG} does not help: the CPU has no kernel for it either."
    if any(t.dtype in _WIDE for t in met.op.outputs):
        return f"{_FLAG} does not help: its result is float64, which mps cannot hold."
    return ""


def _price(met: _Met) -> str:
    ins = sum(t.device == "mps" for t in met.op.inputs)
    outs = sum(t.device == "mps" for t in met.op.outputs)
    steps = ((met.calls, "a training step"), (met.evaluated, "an evaluation step"))
    often = " and ".join(f"{number} in {step}" for number, step in steps if number)
    copies = f"{ins} tensor{'' if ins == 1 else 's'} copied there and {outs} back"
    return (
        f"Each call is a round trip to the host ({often or 'as the model is made'}), with "
        f"{copies}, while the GPU waits."
    )


def _fix(met: _Met, runs: bool, flag_helps: bool) -> str:
    use = advice(met.name)
    if runs:
        return f"Nothing, if it is rare. Else: {use}"
    if not flag_helps:
        return use
    return f"{use} Or set {_FLAG} before torch is imported (importing anytrain first does)."


def _may_fail(met: _Met, condition: Condition) -> Finding:
    return Finding(
        "kernels",
        "warning",
        f"{met.op.name} {condition.what}",
        why=f"{condition.why} {_FLAG} does not help: there is a kernel, and it refuses.",
        fix=condition.fix,
        place=met.op.place,
        per_step=met.calls,
        certain=False,
    )
