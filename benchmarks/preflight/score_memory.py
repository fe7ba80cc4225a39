"""Score the memory forecast: what was foretold against what one GPU really held.

    PYTHONPATH=src python benchmarks/preflight/score_memory.py [--output FILE]      peaks, 24 cases
    PYTHONPATH=src python benchmarks/preflight/score_memory.py --batches            largest batches
    PYTHONPATH=src python benchmarks/preflight/score_memory.py --cpu                small, on a CPU

A case is a model, a precision, and whether every repeated block is checkpointed. Each is traced on
a claimed device, and run for real by anytrain's Trainer, op by op and recorded, in processes of
their own. The yardstick is torch.cuda.max_memory_allocated(); on a CPU it is what torch's profiler
sees the allocator do. Largest batches are sought under set_per_process_memory_fraction: the size
that was found must run, and the next one must not.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB, GIB = 2**20, 2**30
LONGEST_S = 30
"""How long a run waits to be recorded: kernels are compiled the first time."""
GPU = "cuda:h200"
# The model, its batch in the cases of memory, and the cap in GiB of those of batches.
MODELS = {
    "bert-base": (32, 8),
    "bert-large": (16, 12),
    "gpt2-small": (8, 12),
    "gpt2-medium": (4, 16),
    "vit-b": (32, 8),
    "resnet-50": (32, 8),
}
SMALL = {"bert-tiny": (8, 1), "gpt2-tiny": (4, 1), "vit-tiny": (64, 1), "resnet-tiny": (64, 1)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model in one way of computing."""

    model: str
    precision: str
    is_checkpointed: bool
    batch_size: int

    def __str__(self) -> str:
        kept = ", checkpointed" if self.is_checkpointed else ""
        return f"{self.model}, {self.precision}{kept}, {self.batch_size} at once"

    @property
    def words(self) -> list[str]:
        """The arguments that run it."""
        kept = ["--checkpointed"] if self.is_checkpointed else []
        return ["--one", self.model, "--precision", self.precision, *kept,
                "--batch", str(self.batch_size)]  # fmt: skip


# -- one case, traced or real ---------------------------------------------------------------------


def build(name: str) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """Return a model with random weights, and what makes its n-th sample."""
    import torch
    import transformers as hf

    family, _, size = name.partition("-")
    if family == "bert":
        sizes = {"tiny": (4, 128, 2), "base": (12, 768, 12), "large": (24, 1024, 16)}
        layers, width, heads = sizes[size]
        config = hf.BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
        return hf.BertForSequenceClassification(config), lambda n: {
            "input_ids": torch.arange(128) + n % 1000,
            "attention_mask": (torch.arange(128) < 96 + n % 32).long(),
            "labels": n % 2,
        }
    if family == "gpt2":
        sizes = {"tiny": (4, 128, 2), "small": (12, 768, 12), "medium": (24, 1024, 16)}
        layers, width, heads = sizes[size]
        length = 128 if size == "tiny" else 512
        config = hf.GPT2Config(n_layer=layers, n_embd=width, n_head=heads)
        ids = torch.arange(length)
        return hf.GPT2LMHeadModel(config), lambda n: {
            "input_ids": ids + n % 1000,
            "labels": ids + n % 1000,
        }
    side = 64 if size == "tiny" else 224
    sample = {"pixel_values": torch.linspace(-1, 1, 3 * side * side).reshape(3, side, side)}
    if family == "vit":
        plain = {"tiny": (4, 96, 2), "b": (12, 768, 12)}[size]
        config = hf.ViTConfig(
            num_hidden_layers=plain[0],
            hidden_size=plain[1],
            num_attention_heads=plain[2],
            intermediate_size=4 * plain[1],
            image_size=side,
            num_labels=1000,
        )
        model = hf.ViTForImageClassification(config)
    else:
        more = {"hidden_sizes": [32, 64], "depths": [3, 3], "embedding_size": 16, "num_labels": 10}
        config = hf.ResNetConfig(**(more if size == "tiny" else {"num_labels": 1000}))
        model = hf.ResNetForImageClassification(config)
    return model, lambda n: {**sample, "labels": n % 10}


class Samples:
    """As many samples as the steps need."""

    def __init__(self, make: Callable[[int], dict[str, Any]], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._make(number)


def train(case: Case, engine: str, steps: int) -> Any:
    """Train a few steps by anytrain's Trainer; return it."""
    from anytrain import Trainer, TrainerCallback, TrainingArguments
    from anytrain.engine.step.activations import Activations

    class Enough(TrainerCallback):
        """End the training a few steps after they are recorded, or when that takes too long."""

        replayed, begin = 0, 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            how = trainer.accelerator.plan.step
            self.replayed += how.value == "cuda_graph"
            is_late = time.perf_counter() - self.begin > LONGEST_S
            is_never = state.global_step > 8 and "first steps" not in how.because
            control.should_training_stop = self.replayed > 3 or is_late or is_never

    model, make = build(case.model)
    if case.is_checkpointed:
        activations = Activations(model)
        while activations.fewer():
            pass
        assert activations.num_checkpointed, "nothing to checkpoint"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.batch_size,
            max_steps=steps,
            precision=case.precision,
            step_engine=engine,
            save_strategy="no",
            logging_steps=steps,
            disable_tqdm=True,
            report_to="none",
        )
        data: Any = Samples(make, case.batch_size * steps)
        looks = [Enough()] if engine == "auto" else []
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=looks)
        trainer.train()
    return trainer


def one(args: argparse.Namespace) -> None:
    """Run one case here; with --measure say what it held."""
    case = Case(args.one, args.precision, args.checkpointed, args.batch)
    if not args.measure:
        train(case, "eager", 4)
        return
    import torch

    from anytrain.machine.backends.cuda import Cuda

    if args.measure == "cpu":
        print("MEASURED", json.dumps({"peak": _profiled(lambda: train(case, "eager", 2))}))
        return
    if args.cap:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.cap / whole)
    found: dict[str, Any] = {"ran": True}
    begin = time.perf_counter()
    try:
        trainer = train(case, args.engine, args.steps)
        found["step"] = str(trainer.accelerator.plan.step)
        found["because"] = trainer.accelerator.plan.step.because
    except Exception as error:
        if not Cuda().is_out_of_memory(error):
            raise
        found = {"ran": False, "error": str(error).splitlines()[0]}
    stats = torch.cuda.memory_stats()
    found |= {
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "requested": stats.get("requested_bytes.all.peak"),
        "retries": stats.get("num_alloc_retries"),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print("MEASURED", json.dumps(found))


def _profiled(work: Callable[[], Any]) -> int:
    """Return the most that torch's CPU allocator held, as its own reports tell."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return max(
        event["args"]["Total Allocated"]
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    )


# -- all cases ------------------------------------------------------------------------------------


def measured(case: Case, *more: str) -> dict[str, Any]:
    """Run a case for real in a process of its own."""
    command = [sys.executable, __file__, *case.words, *more]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("MEASURED ")]
    if not lines:
        return {"broken": (ran.stderr or ran.stdout)[-800:]}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("MEASURED "))
    return found


def traced(case: Case, target: Any) -> Any:
    """Trace a case on the claimed target."""
    from anytrain.insight.preflight.trace_process import trace_run

    trace = trace_run(target, [__file__, *case.words])
    if trace.failure:
        raise RuntimeError(f"{case}: {trace.failure}")
    return trace


def foretold(trace: Any, target: Any, *, is_recorded: bool) -> dict[str, Any]:
    """Return the forecast of a trace, as plain values."""
    from anytrain.insight.preflight.memory import forecast
    from anytrain.insight.preflight.step_time import estimate, rates_of

    told, rates = forecast(trace, target, is_recorded=is_recorded), rates_of(target)
    return {
        "peak": told.peak_bytes,
        "needed": told.needed_bytes,
        "counted": trace.held.peak_bytes,
        "parts": {f"{p.name} ({p.how})": p.num_bytes for p in told.parts},
        "trace_s": round(trace.trace_s, 1),
        "step_s": None if rates is None else estimate(trace, rates).step_s,
        "recorded_step_s": None
        if rates is None
        else estimate(trace, rates, is_recorded=True).step_s,
    }


def cases(models: dict[str, tuple[int, int]]) -> list[Case]:
    """Return every model in both precisions, plain and checkpointed."""
    return [
        Case(name, precision, kept, batch)
        for name, (batch, _) in models.items()
        for precision in ("no", "bf16")
        for kept in (False, True)
    ]


def score_peaks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare peaks, case by case."""
    from anytrain.insight.preflight.targets import parse_target

    target = parse_target("cpu:16GB" if args.cpu else args.target)
    engines = ("cpu",) if args.cpu else ("eager", "auto")

    def run(case: Case) -> dict[str, Any]:
        row: dict[str, Any] = {"case": str(case)}
        try:
            trace = traced(case, target)
            for engine in engines:
                steps = "600" if engine == "auto" else "4"
                real = measured(case, "--measure", "cpu") if args.cpu else measured(
                    case, "--measure", "cuda", "--engine", engine, "--steps", steps)  # fmt: skip
                told = foretold(trace, target, is_recorded=real.get("step") == "cuda_graph")
                row[engine] = _compared(told, real)
        except Exception as error:  # noqa: BLE001  one case's trouble is told, the others go on
            row["broken"] = str(error)[-800:]
        tell(row)
        return row

    return _all(run, chosen(cases(SMALL if args.cpu else MODELS), args), args.jobs)


def _compared(told: dict[str, Any], real: dict[str, Any]) -> dict[str, Any]:
    found = {"told": told, "real": real}
    if "peak" in real:
        found["error"] = told["peak"] / real["peak"] - 1
        found["off_mib"] = (told["peak"] - real["peak"]) / MIB
    return found


def score_batches(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seek the largest batch of each model in both precisions, and try it and the next one."""
    from anytrain.insight.preflight.batch_search import largest_batch
    from anytrain.insight.preflight.memory import capped
    from anytrain.insight.preflight.targets import parse_target
    from anytrain.insight.preflight.trace import Setting

    target = parse_target(args.target)

    def run(case: Case) -> dict[str, Any]:
        row: dict[str, Any] = {"case": str(case)}
        cap = MODELS[case.model][1] * GIB
        try:
            begin = time.perf_counter()
            fit = largest_batch(
                lambda s: traced(dataclasses.replace(case, batch_size=s.batch_size), target),
                target,
                Setting(case.batch_size, case.precision, case.is_checkpointed),
                limit=capped(cap),
            )
            assert fit is not None
            row |= {"cap_gib": cap / GIB, "told": fit.largest, "is_proven": fit.is_proven,
                    "sought_s": round(time.perf_counter() - begin, 1)}  # fmt: skip
            row |= _tried(case, fit.largest, cap)
        except Exception as error:  # noqa: BLE001  one case's trouble is told, the others go on
            row["broken"] = str(error)[-800:]
        tell(row)
        return row

    plain = [c for c in cases(MODELS) if not c.is_checkpointed]
    return _all(run, chosen(plain, args), args.jobs)


def _tried(case: Case, told: int, cap: int) -> dict[str, Any]:
    """Find the size that really is the largest, from the one that was told; a few steps away."""
    tries: dict[int, dict[str, Any]] = {}

    def runs(size: int) -> bool:
        tries[size] = measured(
            dataclasses.replace(case, batch_size=size),
            *("--measure", "cuda", "--cap", str(cap), "--steps", "200", "--engine", "auto"),
        )
        return bool(tries[size].get("ran"))

    real, step = told, 1 if runs(told) else -1
    for _ in range(3):
        if step > 0 and not runs(real + 1):
            break
        real += step
        if step < 0 and runs(real):
            break
    return {"real": real, "runs": bool(tries[told].get("ran")), "is_exact": real == told,
            "tries": tries}  # fmt: skip


def chosen(found: Iterable[Case], args: argparse.Namespace) -> list[Case]:
    """Return the cases whose name holds the word that was given."""
    return [case for case in found if args.only in str(case)]


def _all(run: Callable[[Case], dict[str, Any]], wanted: list[Case], jobs: int) -> list[Any]:
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, wanted))


def tell(row: dict[str, Any]) -> None:
    """Print one case's line."""
    if "broken" in row:
        print(f"{row['case']}: broken: {row['broken'][-300:]}", flush=True)
        return
    if "told" in row:
        word = "exact" if row["is_exact"] else f"really {row['real']}"
        word += "" if row["runs"] else ", OUT OF MEMORY at the size told"
        print(f"{row['case']}: told {row['told']}, {word}, {row['sought_s']} s", flush=True)
        return
    for engine in ("cpu", "eager", "auto"):
        if engine in row:
            found = row[engine]
            told, real = found["told"]["peak"] / MIB, found["real"].get("peak", 0) / MIB
            error = f"{found['error']:+.2%}" if "error" in found else str(found["real"])[:300]
            how = found["real"].get("step", engine)
            print(f"{row['case']} [{how}]: told {told:.1f} MiB, real {real:.1f}, {error}",
                  flush=True)  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that the goals are about."""
    if any("told" in row for row in rows):
        whole = [row for row in rows if "told" in row]
        return {
            "cases": len(rows),
            "exact": sum(row["is_exact"] for row in whole),
            "out_of_memory_at_the_size_told": sum(not row["runs"] for row in whole),
        }
    found: dict[str, Any] = {"cases": len(rows), "broken": sum("broken" in row for row in rows)}
    for engine in ("cpu", "eager", "auto"):
        errors = [abs(r[engine]["error"]) for r in rows if "error" in r.get(engine, {})]
        if errors:
            found[engine] = {"median": statistics.median(errors), "worst": max(errors)}
    return found


def main() -> None:
    """Score, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="small models on this CPU")
    parser.add_argument("--batches", action="store_true", help="largest batches under a cap")
    parser.add_argument("--target", default=GPU, help="the device that is here")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 3))
    parser.add_argument("--output", help="a file for all figures, as JSON")
    for name, kind in (("one", str), ("measure", str), ("engine", str)):
        parser.add_argument(f"--{name}", type=kind, default="", help=argparse.SUPPRESS)
    for name, number in (("batch", 8), ("steps", 4), ("cap", 0)):
        parser.add_argument(f"--{name}", type=int, default=number, help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="no", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args)
        return
    import torch

    begin = time.perf_counter()
    rows = score_batches(args) if args.batches else score_peaks(args)
    found = {
        "summary": summary(rows),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "day": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - begin),
        "rows": rows,
    }
    print(json.dumps({key: value for key, value in found.items() if key != "rows"}, indent=1))
    if args.output:
        Path(args.output).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
