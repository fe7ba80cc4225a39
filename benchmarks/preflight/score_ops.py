"""Score what preflight says of Apple's backend against PyTorch's own list of what fails there.

    python benchmarks/preflight/score_ops.py
    python benchmarks/preflight/score_ops.py --torch 2.12.0 --list path/to/common_mps.py

Every OpInfo of the installed torch (PyTorch's data base of operators with sample inputs) runs its
samples on the CPU, once forward alone and once forward and backward, while a dispatch mode writes
down each operation as preflight's tracer would. `checks.kernels` and `checks.dtypes` are then asked
of the traces as if the CPU had been an mps device, without the CPU fallback. An OpInfo is predicted
to fail if any of its samples yields an error, or a warning that it may fail.

What is scored: the OpInfos that know float32 and run on the CPU, less those that PyTorch's tests
of mps skip (`SKIPLIST`, `EMPTY_OPS_SKIPLIST`): 664 with torch 2.13. Samples are asked for as for
mps (some are others there: bfloat16 instead of float64), and put on the CPU; a sample that names
the CPU as its device stays there in PyTorch's tests too, and is passed over.

The yardstick is read from `torch/testing/_internal/common_mps.py`, by this program alone.

- *Forward*: the OpInfo is named for float32 in `UNIMPLEMENTED_XFAILLIST` (what PyTorch knows to be
  unimplemented on mps) or in `ON_MPS_XFAILLIST` (what fails for want of something downstream). The
  other lists are about undefined results and old systems.
- *Forward and backward*: the same, or it is named for float32 in `XFAILLIST_GRAD` or the second
  `ON_MPS_XFAILLIST`. These lists are not about kernels alone. Two kinds are told apart by what is
  seen on the CPU, whatever was predicted: an OpInfo for which no gradient can be computed on the
  CPU either (there is no derivative, on any device), and one that draws random numbers (CPU and
  GPU draw others, and the comparison fails). Both are judged by their forward pass alone. The
  score with them left in is printed too, as "every entry".

For a held-out version the samples are the installed torch's, the tables and the lists the other's.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import pickle
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from anytrain.insight.preflight.checks import dtypes, kernels
from anytrain.insight.preflight.fake_device import kernel_choice
from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import (
    Held,
    Op,
    Phase,
    SourcePlace,
    TensorFacts,
    Trace,
    TracedJob,
)

NEWEST_MACOS = 26.0
"""Some entries of the lists are for older systems alone."""


@dataclass(frozen=True)
class Traced:
    """What the samples of one OpInfo did."""

    key: str
    forward: tuple[Op, ...]
    both: tuple[Op, ...]
    """Of the samples that ask for gradients: forward and backward."""
    backward_runs: bool
    """Whether any sample has a gradient, on the CPU."""
    draws: bool
    """Whether random numbers are drawn."""
    runs: bool
    """Whether the samples run on the CPU."""


class Recorder(TorchDispatchMode):
    """Write down each operation that reaches the device."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.ops: dict[Op, None] = {}
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        self.ops.setdefault(self._op(func, args, kwargs or {}, result))
        return result

    def _op(self, func: Any, args: Any, kwargs: Any, result: Any) -> Op:
        schema = kernel_choice.operation_on_mps(func)._schema
        space, _, name = schema.name.partition("::")
        name = name if space == "aten" else schema.name
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        settings = {k: plain(v) for k, v in named.items() if next(tensors(v), None) is None}
        return Op(
            name=f"{name}.{schema.overload_name}" if schema.overload_name else name,
            phase=self.phase,
            place=SourcePlace(),
            inputs=tuple(facts(t) for t in tensors(named)),
            outputs=tuple(facts(t) for t in tensors(result)),
            settings=tuple(settings.items()),
            calls=1,
            flops=0,
            bytes=0,
        )


def tensors(value: Any) -> Iterator[torch.Tensor]:
    return (t for t in tree_iter(value) if isinstance(t, torch.Tensor))


def facts(tensor: torch.Tensor) -> TensorFacts:
    # 0-dim CPU tensors may meet mps ones; here all stand for tensors of the device.
    return TensorFacts(str(tensor.dtype)[6:], tuple(tensor.shape), "mps")


def plain(value: Any) -> object:
    if isinstance(value, list | tuple):
        return tuple(plain(v) for v in value)
    if isinstance(value, torch.dtype | torch.layout):
        return str(value)[6:]
    return (
        value if isinstance(value, int | float | str | bool | complex | type(None)) else str(value)
    )


def load_op_infos() -> list[Any]:
    try:
        import expecttest  # noqa: F401
    except ModuleNotFoundError:
        # torch's test modules import it, the data base of operators doesn't use it.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


class OnCpu(TorchFunctionMode):
    """Put on the CPU what is meant for mps."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:  # what samples ask, to know whom they are for
            return func(*args, **(kwargs or {}))
        named = {k: put_on_cpu(v) for k, v in (kwargs or {}).items()}
        return func(*map(put_on_cpu, args), **named)


def put_on_cpu(value: Any) -> Any:
    is_mps = isinstance(value, str | torch.device) and str(value).startswith("mps")
    return torch.device("cpu") if is_mps else value


def run_sample(info: Any, sample: Any, recorder: Recorder, backward: bool) -> bool:
    """Run one sample; answer whether its backward ran."""
    leaves = [t for t in tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    recorder.phase = "forward"
    with recorder:
        out = info.op(sample.input, *sample.args, **sample.kwargs)
        out = sample.output_process_fn_grad(out) if backward else out
    outs = [t for t in tensors(out) if t.requires_grad]
    if not (backward and outs):
        return False
    seeds = [torch.ones_like(t) for t in outs]
    recorder.phase = "backward"
    with recorder:
        torch.autograd.grad(outs, leaves, seeds, allow_unused=True)
    return True


def trace(info: Any) -> Traced:
    forward, both, runs, differs = Recorder(), Recorder(), False, False
    for recorder in (forward, both) if info.supports_autograd else (forward,):
        torch.manual_seed(0)
        backward = recorder is both
        for sample in info.sample_inputs("mps", torch.float32, requires_grad=backward):
            if str(sample.kwargs.get("device")) == "cpu":
                continue
            # The CPU's own failures are no word on mps: the OpInfo is left out if nothing runs.
            with contextlib.suppress(RuntimeError, AssertionError, NotImplementedError):
                differs |= run_sample(info, sample, recorder, backward)
                runs = True
    key = info.name + info.variant_test_name
    draws = forward.draws or both.draws
    return Traced(key, tuple(forward.ops), tuple(both.ops), differs, draws, runs)


def trace_all(cache: Path | None) -> list[Traced]:
    if cache is not None and cache.is_file():
        return pickle.loads(cache.read_bytes())
    warnings.simplefilter("ignore")
    library = torch.library.Library("aten", "IMPL")
    kernel_choice.keep_svd_whole(library, "AutogradCPU")
    with OnCpu():
        traced = [trace(info) for info in load_op_infos() if torch.float32 in info.dtypes]
    if cache is not None:
        cache.write_bytes(pickle.dumps(traced))
    return traced


def read_lists(path: Path) -> dict[str, Any]:
    """Return the dictionaries of known failures: "<function>.<name>"."""
    found = {}
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in function.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                code = compile(ast.Expression(node.value), str(path), "eval")
                known = {"torch": torch, "MACOS_VERSION": NEWEST_MACOS}
                found[f"{function.name}.{ast.unparse(target)}"] = eval(code, known)
    return found


def named(lists: dict[str, Any], *names: str) -> set[str]:
    """Return the OpInfos that these lists name for float32."""
    entries = (entry for name in names for entry in lists.get(name, {}).items())
    return {key for key, dtypes in entries if dtypes is None or torch.float32 in dtypes}


def predict(ops: tuple[Op, ...], version: str) -> list[Finding]:
    """Return what preflight's own questions say will, or may, fail."""
    target = Target("mps", "mps", None, version)
    whole = Trace(TracedJob(), ops, Held(0, {}, {}, ()), 0.0)
    found = [*kernels.check(whole, target), *dtypes.check(whole, target)]
    return [
        f for f in found if f.severity == "error" or (f.severity == "warning" and not f.certain)
    ]


@dataclass
class Score:
    """How predictions and a list agree."""

    title: str
    hits: int = 0
    alarms: dict[str, str] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    quiet: int = 0

    def count(self, key: str, found: list[Finding], fails: bool) -> None:
        if found and fails:
            self.hits += 1
        elif found:
            self.alarms[key] = "; ".join(f.what for f in found)
        elif fails:
            self.missed.append(key)
        else:
            self.quiet += 1

    def __str__(self) -> str:
        precision = self.hits / max(1, self.hits + len(self.alarms))
        recall = self.hits / max(1, self.hits + len(self.missed))
        total = self.hits + len(self.alarms) + len(self.missed) + self.quiet
        lines = [
            f"{self.title}: precision {precision:.3f}, recall {recall:.3f} of {total} OpInfos "
            f"({self.hits} hits, {len(self.alarms)} false alarms, {len(self.missed)} missed)"
        ]
        lines += [f"  false alarm: {key}: {what}" for key, what in sorted(self.alarms.items())]
        return "\n".join(lines + [f"  missed: {key}" for key in sorted(self.missed)])


def score(traced: list[Traced], lists: dict[str, Any], version: str) -> list[Score]:
    first, second = "mps_ops_modifier.", "mps_ops_grad_modifier."
    skipped = set(lists[first + "SKIPLIST"]) | set(lists[first + "EMPTY_OPS_SKIPLIST"])
    forward = named(lists, first + "UNIMPLEMENTED_XFAILLIST", first + "ON_MPS_XFAILLIST")
    backward = named(lists, second + "XFAILLIST_GRAD", second + "ON_MPS_XFAILLIST")
    scores = [Score("forward"), Score("forward and backward"), Score("... every entry")]
    for each in traced:
        if not each.runs or each.key in skipped:
            continue
        alone = predict(each.forward, version)
        both = alone + predict(each.both, version)
        fails, fails_back = each.key in forward, each.key in backward
        is_fair = each.backward_runs and not each.draws
        scores[0].count(each.key, alone, fails)
        scores[1].count(each.key, both if is_fair else alone, fails or (is_fair and fails_back))
        scores[2].count(each.key, both, fails or fails_back)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--torch", default=torch.__version__, help="whose tables to ask")
    parser.add_argument("--list", type=Path, help="that version's common_mps.py")
    parser.add_argument("--cache", type=Path, help="a file to keep the traces in, between calls")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.list or Path(torch.__path__[0]) / "testing/_internal/common_mps.py"
    print(f"torch {torch.__version__}'s samples, tables and lists of {args.torch}")
    for each in score(trace_all(args.cache), read_lists(path), args.torch):
        print(each)


if __name__ == "__main__":
    main()
