"""How much faster bf16 trains than fp32 on this processor: measured once, and kept.

Which instructions a processor has does not tell: some make bfloat16 up out of float32, some have
it and gain little. A run whose precision is automatic asks here; others never wait for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from anytrain.core import documents, environment
from anytrain.core.facts import Capabilities, Gain
from anytrain.core.plan import Wishes

# A small BERT's layer: its rows, its width, and the width of its middle.
_ROWS, _WIDTH, _MIDDLE = 256, 384, 1536
_FEW_ROWS = 32
_FEWEST_ROUNDS = 2
_HOPELESS = 0.25
"""A ratio that no number of rows makes good."""
_SECONDS = 0.15


def is_wanted(wishes: Wishes, machine: Capabilities) -> bool:
    """Whether a choice hangs on the figure: the precision is free, on a device that may lose."""
    automatic = wishes.precision is not None and wishes.precision.value == "auto"
    return automatic and machine.backend == "cpu" and "bfloat16" in machine.dtypes


def bf16_gain(processor: str) -> Gain:
    """Return how many times as fast as fp32 a step is in bf16, from an earlier run or measured."""
    key = f"{processor}, torch {torch.__version__}"
    path = environment.cache_folder() / "machine.json"
    kept = _read(path)
    try:
        return Gain(float(kept[key]["bf16_gain"]), str(kept[key]["day"]))
    except (KeyError, TypeError, ValueError):
        pass  # not measured yet, or damaged
    found = Gain(round(measure(), 2), date.today().isoformat())
    _write(path, {**kept, key: {"bf16_gain": found.factor, "day": found.day}})
    return found


def measure(seconds: float = _SECONDS) -> float:
    """Time forward and backward of two layers in both precisions, by turns; return the ratio.

    The processor's time of one thread is taken: what else runs here hardly changes it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            return _ratio(_layers(), seconds)
    finally:
        torch.set_num_threads(threads)


def _layers() -> Callable[[int, bool], None]:
    """Return a step that may run in bf16. No random numbers: a run must not notice."""
    every, up, down = (
        torch.linspace(-1, 1, high * wide).reshape(high, wide).requires_grad_()
        for high, wide in ((_ROWS, _WIDTH), (_MIDDLE, _WIDTH), (_WIDTH, _MIDDLE))
    )

    def step(num_rows: int, in_bf16: bool) -> None:
        rows = every[:num_rows]
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            middle = functional.gelu(functional.linear(rows, up))
            out = functional.layer_norm(functional.linear(middle, down) + rows, (_WIDTH,))
        torch.autograd.grad(out.float().sum(), (rows, up, down))

    return step


def _ratio(step: Callable[[int, bool], None], seconds: float) -> float:
    """Return the time of a step in fp32 over that in bf16.

    A few rows tell first if it is hopeless: a processor that makes bfloat16 up may take twenty
    times as long, and seconds for all of them.
    """
    found = _best_ratio(partial(step, _FEW_ROWS), 0.0)
    return found if found < _HOPELESS else _best_ratio(partial(step, _ROWS), seconds)


def _best_ratio(step: Callable[[bool], None], seconds: float) -> float:
    """Return the best time in fp32 over that in bf16: the best is the least disturbed."""
    best = {False: float("inf"), True: float("inf")}
    for in_bf16 in best:
        step(in_bf16)  # kernels are made at their first use
    begin, rounds = time.thread_time(), 0
    while rounds < _FEWEST_ROUNDS or time.thread_time() - begin < seconds:
        for in_bf16 in best:
            start = time.thread_time()
            step(in_bf16)
            best[in_bf16] = min(best[in_bf16], time.thread_time() - start)
        rounds += 1
    return best[False] / best[True]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = documents.from_json(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, figures: dict[str, Any]) -> None:
    """Keep the figures for the next run; where that cannot be, it measures again."""
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(figures, indent=2))
        os.replace(unfinished, path)
