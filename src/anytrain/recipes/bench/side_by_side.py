"""Run the contenders one after the other, each in a process of its own. Loads no torch.

Every round turns the order around, so that a slow moment of the machine does not always meet the
same one.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from anytrain.core.errors import BadInput
from anytrain.recipes.bench.contenders import Contender
from anytrain.recipes.bench.settings import SIZES, Settings

_CHILD = "anytrain.recipes.bench.child"
Tell = Callable[[str], None]


@dataclass
class Outcome:
    """Everything a comparison found, fit for a file."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    date: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that did not run, and why."""


def compare(
    settings: Settings,
    contenders: Sequence[Contender],
    seeds: int,
    folder: Path,
    tell: Tell,
    keep: Callable[[Outcome], None],
) -> Outcome:
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
    found = Outcome(asdict(settings), machine, datetime.date.today().isoformat())
    able = [each for each in contenders if _can_run(each, found)]
    for name, why in found.left_out.items():
        tell(f"{name}: left out, {why}")
    for seed in range(1, seeds + 1):
        for each in able if seed % 2 else list(reversed(able)):
            if each.name not in found.left_out:
                _run(each, seed, folder, found, tell)
                keep(found)
    return found


def _run(each: Contender, seed: int, folder: Path, found: Outcome, tell: Tell) -> None:
    began = time.perf_counter()
    try:
        told = _ask(folder, each.name, str(seed), repr(time.time()))
    except BadInput as error:
        found.left_out[each.name] = f"it failed: {error.why}"
        log = folder / f"{each.name}-{seed}.log"
        tell(f"{each.name} failed; the end of what it said:")
        tell("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]))
        return
    found.runs.append({"name": each.name, "seed": seed, **told})
    tell(
        f"{each.name}, seed {seed}: {told['seconds']:.2f} s, "
        f"{told['samples_per_second']:.1f} samples/s, {told['precision']}, "
        f"loss {told['train_loss']:.3f} (process {time.perf_counter() - began:.0f} s)"
    )


def _can_run(each: Contender, found: Outcome) -> bool:
    if each.is_missing:
        found.left_out[each.name] = f"{each.library} is not installed"
    elif each.needs_cuda and found.machine["backend"] != "cuda":
        found.left_out[each.name] = f"{each.precision} needs a CUDA device"
    return each.name not in found.left_out


def _with_shapes(settings: Settings, backend: str) -> Settings:
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
        told: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return told
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    raise BadInput(
        f"The process of {words[0]!r} failed.",
        why=f"it ended with code {done.returncode}: {said[-1] if said else 'without a word'}",
        fix="look at what it printed.",
    )
