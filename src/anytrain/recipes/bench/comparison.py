"""Compare the contenders: who they are, their runs one after the other, and one row for each.

Every contender runs in a process of its own. Every round turns the order around, so that a slow
moment of the machine does not always meet the same one. Loads no torch.
"""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anytrain.core.errors import BadInput
from anytrain.core.nearest import unknown
from anytrain.recipes.bench.settings import SIZES, BenchSettings

_HERE = "anytrain.recipes.bench"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train, and where its function is."""

    name: str
    what: str
    run: str
    library: str
    precision: str
    """fp32, tf32, bf16; or auto, which the device decides."""
    padding: str
    """max: to the length asked for. dynamic: to the longest of a batch. sorted: the same, with
    rows of like length together. buckets: what anytrain chooses."""
    needs_cuda: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether anytrain trains it."""
        return self.library == "anytrain"

    @property
    def is_missing(self) -> bool:
        """Whether its library is not installed here."""
        return find_spec(self.library) is None


def _table() -> dict[str, Contender]:
    ours, step = f"{_HERE}.ours:trainer", f"{_HERE}.ours:own_loop"
    hf, loop = f"{_HERE}.peers:hf_trainer", f"{_HERE}.peers:accelerate_loop"
    fabric, raw = f"{_HERE}.peers:fabric_loop", f"{_HERE}.peers:raw_loop"
    hf_padded = "HF Trainer"
    rows = (
        ("anytrain", "anytrain Trainer, as `anytrain glue`", ours, "anytrain", "auto", "buckets"),
        ("anytrain-bf16-padded", "anytrain Trainer", ours, "anytrain", "bf16", "max"),
        ("anytrain-fp32", "anytrain Trainer", ours, "anytrain", "fp32", "buckets"),
        ("anytrain-fp32-padded", "anytrain Trainer", ours, "anytrain", "fp32", "max"),
        ("anytrain-step", "own loop, accelerator.step", step, "anytrain", "auto", "dynamic"),
        ("hf", "HF Trainer, as it comes", hf, "transformers", "fp32", "max"),
        ("hf-tf32", hf_padded, hf, "transformers", "tf32", "max"),
        ("hf-fp32-dynamic", hf_padded, hf, "transformers", "fp32", "dynamic"),
        ("hf-bf16", hf_padded, hf, "transformers", "bf16", "max"),
        ("hf-bf16-dynamic", hf_padded, hf, "transformers", "bf16", "dynamic"),
        ("accelerate-bf16", "Accelerate loop", loop, "accelerate", "bf16", "max"),
        ("accelerate-bf16-dynamic", "Accelerate loop", loop, "accelerate", "bf16", "dynamic"),
        ("fabric-bf16", "Lightning Fabric loop", fabric, "lightning", "bf16", "max"),
        ("fabric-bf16-dynamic", "Lightning Fabric loop", fabric, "lightning", "bf16", "dynamic"),
        ("raw-fp32", "raw PyTorch loop", raw, "torch", "fp32", "max"),
        ("raw-bf16", "raw PyTorch loop", raw, "torch", "bf16", "max"),
        ("raw-bf16-sorted", "raw loop, batches of like length", raw, "torch", "bf16", "sorted"),
    )
    return {row[0]: Contender(*row, needs_cuda=row[4] == "tf32") for row in rows}


CONTENDERS = _table()
BASE = "hf"
# Where all rows have one length, padding makes no difference, and float32 takes very long.
_FOR_EVEN_ROWS = (
    "anytrain",
    "anytrain-step",
    "hf-bf16",
    "accelerate-bf16",
    "fabric-bf16",
    "raw-bf16",
)


def choose(asked: str, *, even: bool) -> list[Contender]:
    """Return the contenders that are asked for by name, or those that make sense."""
    names: Sequence[str] = [name for name in asked.replace(" ", "").split(",") if name]
    wrong = [name for name in names if name not in CONTENDERS]
    if wrong:
        fix = "name some of them, separated by commas, or none for all."
        raise unknown("contender", wrong[0], CONTENDERS, fix=fix)
    return [CONTENDERS[name] for name in names or (_FOR_EVEN_ROWS if even else CONTENDERS)]


_CHILD = "anytrain.recipes.bench.child"
Tell = Callable[[str], None]


@dataclass
class Comparison:
    """Everything a comparison found, fit for a file."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    date: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that did not run, and why."""


def compare(
    settings: BenchSettings,
    contenders: Sequence[Contender],
    seeds: int,
    folder: Path,
    tell: Tell,
    keep: Callable[[Comparison], None],
) -> Comparison:
    """Train every contender once a seed; what fails is left out with its reason, not hidden.

    `keep` is given what is known after each of them, so that a run cut short is not lost.
    """
    settings.save(folder / "settings.json")
    tell("Preparing the rows and the weights that all begin with ...")
    machine = _ask(folder, "prepare")
    # HF wants to be told that the CPU is meant where it finds no GPU.
    settings = replace(settings, cpu=machine["backend"] == "cpu")
    settings = _with_shapes(settings, str(machine["backend"]))
    settings.save(folder / "settings.json")
    found = Comparison(asdict(settings), machine, datetime.date.today().isoformat())
    able = [each for each in contenders if _can_run(each, found)]
    for name, why in found.left_out.items():
        tell(f"{name}: left out, {why}")
    for seed in range(1, seeds + 1):
        for each in able if seed % 2 else list(reversed(able)):
            if each.name not in found.left_out:
                _run(each, seed, folder, found, tell)
                keep(found)
    return found


def _run(each: Contender, seed: int, folder: Path, found: Comparison, tell: Tell) -> None:
    began = time.perf_counter()
    try:
        answer = _ask(folder, each.name, str(seed), repr(time.time()))
    except BadInput as error:
        found.left_out[each.name] = f"it failed: {error.why}"
        log = folder / f"{each.name}-{seed}.log"
        tell(f"{each.name} failed; the end of what it said:")
        tell("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]))
        return
    found.runs.append({"name": each.name, "seed": seed, **answer})
    tell(
        f"{each.name}, seed {seed}: {answer['seconds']:.2f} s, "
        f"{answer['samples_per_second']:.1f} samples/s, {answer['precision']}, "
        f"loss {answer['train_loss']:.3f} (process {time.perf_counter() - began:.0f} s)"
    )


def _can_run(each: Contender, found: Comparison) -> bool:
    if each.is_missing:
        found.left_out[each.name] = f"{each.library} is not installed"
    elif each.needs_cuda and found.machine["backend"] != "cuda":
        found.left_out[each.name] = f"{each.precision} needs a CUDA device"
    return each.name not in found.left_out


def _with_shapes(settings: BenchSettings, backend: str) -> BenchSettings:
    """Choose the shapes to measure where none were asked for: none on a slow device."""
    if settings.shapes is not None:
        return settings
    if backend == "cpu":
        return replace(settings, shapes=())
    if SIZES[settings.size].even:
        return replace(settings, shapes=((settings.batch_size, settings.length),))
    rows = settings.batch_size
    return replace(settings, shapes=((rows, settings.length), (rows, 48)))


def _ask(folder: Path, *words: str) -> dict[str, Any]:
    """Run a child to its end and return its answer."""
    answer, log = folder / "answer.json", folder / f"{'-'.join(words[:2])}.log"
    answer.unlink(missing_ok=True)
    with log.open("w", encoding="utf-8") as lines:
        done = subprocess.run(
            [sys.executable, "-m", _CHILD, str(folder), *words],
            stdout=lines,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode == 0 and answer.exists():
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    raise BadInput(
        f"The process of {words[0]!r} failed.",
        why=f"it ended with code {done.returncode}: {said[-1] if said else 'without a word'}",
        fix="look at what it printed.",
    )


# Orders of rows differ from library to library, so losses and scores differ by a little.
LOSS_TOLERANCE = 0.10
SCORE_TOLERANCE = 0.05


@dataclass
class ContenderRow:
    """A contender's typical run, and how it stands to the others."""

    contender: Contender
    runs: Sequence[Mapping[str, Any]]
    precision: str
    seconds: float
    base_ratio: float | None = None
    """How often it would be done while HF Trainer as it comes trains once."""
    like: tuple[str, float] | None = None
    """Of the peers in the same precision the fastest, and the ratio to it."""
    unlike: list[str] = field(default_factory=list)
    """In what it learnt something else than the others."""

    def middle(self, key: str) -> float | None:
        """Return the median of a number over the runs; None where it was not measured."""
        values = [run[key] for run in self.runs if run.get(key) is not None]
        return statistics.median(values) if values else None

    def spread(self, key: str) -> float | None:
        """Return the standard deviation over the runs; None for fewer than two."""
        values = [run[key] for run in self.runs if run.get(key) is not None]
        return statistics.stdev(values) if len(values) > 1 else None

    def shapes(self) -> Iterable[Mapping[str, Any]]:
        """Return the measured shapes of the fastest of the runs."""
        measured = [shape for run in self.runs for shape in run.get("shapes", ())]
        for name in dict.fromkeys(shape["shape"] for shape in measured):
            of_it = [shape for shape in measured if shape["shape"] == name]
            yield min(of_it, key=lambda shape: float(shape["step_s"]))


def summarise(runs: Sequence[Mapping[str, Any]]) -> list[ContenderRow]:
    """Return a row for every contender that ran, in the order of the table."""
    rows = []
    for name, contender in CONTENDERS.items():
        own = [run for run in runs if run["name"] == name]
        if own:
            seconds = statistics.median(float(run["seconds"]) for run in own)
            rows.append(ContenderRow(contender, own, str(own[0]["precision"]), seconds))
    base = next((row for row in rows if row.contender.name == BASE), None)
    for row in rows:
        row.base_ratio = base.seconds / row.seconds if base else None
        row.like = _like_for_like(row, rows)
    _judge(rows)
    return rows


def _like_for_like(row: ContenderRow, rows: Sequence[ContenderRow]) -> tuple[str, float] | None:
    """Compare our own row with the fastest peer of its precision."""
    if not row.contender.is_ours:
        return None
    peers = [r for r in rows if not r.contender.is_ours and r.precision == row.precision]
    best = min(peers, key=lambda peer: peer.seconds, default=None)
    return (best.contender.name, best.seconds / row.seconds) if best else None


def _judge(rows: Sequence[ContenderRow]) -> None:
    """Mark who learnt something else: the middle of all contenders is what it is held to.

    Where rows are classified the loss on those held out is not judged: it moves with every order.
    """
    scored = any(row.middle("accuracy") is not None for row in rows)
    held_out = ("accuracy", SCORE_TOLERANCE) if scored else ("eval_loss", LOSS_TOLERANCE)
    for key, most in (("train_loss", LOSS_TOLERANCE), held_out):
        values = {row.contender.name: row.middle(key) for row in rows}
        known = [value for value in values.values() if value is not None]
        middle = statistics.median(known) if known else 0.0
        # A loss near zero differs by much of itself and by nothing that matters.
        allowed = most if key == "accuracy" else most * max(middle, 0.3)
        for row in rows:
            value = values[row.contender.name]
            if value is not None and not abs(value - middle) <= allowed:  # NaN differs too
                row.unlike.append(f"{key} {value:.3f}, the others' middle is {middle:.3f}")
