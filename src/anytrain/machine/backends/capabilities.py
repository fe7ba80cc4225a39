"""Find out what a device can do by making it do it, and which TPU chips are on the PCI bus.

Tables of what a chip or a torch version "should" support go stale: torch 2.11's fused AdamW on
mps runs, and ignores the flag that tells it to skip a step. Each answer is kept for the process;
how much bf16 gains on this processor is measured once and kept on the disk, for runs whose
precision is automatic. TPU chips are seen without a runtime that would claim them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from anytrain.core import documents, environment
from anytrain.core.errors import DeviceBroken
from anytrain.core.facts import Capabilities, Gain
from anytrain.core.plan import Wishes

_CANDIDATES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A missing kernel raises NotImplementedError (a RuntimeError), a missing dtype TypeError.
_REFUSALS = (RuntimeError, TypeError)
# A small BERT's layer: its rows, its width, and the width of its middle.
_ROWS, _WIDTH, _MIDDLE = 256, 384, 1536
_FEW_ROWS = 32
_FEWEST_ROUNDS = 2
_HOPELESS = 0.25
"""A ratio that no number of rows makes good."""
_SECONDS = 0.15
_GOOGLE = "0x1ae0"
TWO_DEVICE_TPU = "TPU v2/v3"
# Google's network cards carry the same vendor number: only these devices are TPUs.
_TPU_NAMES = {
    "0x0027": TWO_DEVICE_TPU,
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU v7",
}


@cache
def working_dtypes(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes in which a small matmul and its backward come out right."""
    names = []
    for dtype in _CANDIDATES:
        try:
            right = _matmul_is_right(device, dtype)
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            if dtype is torch.float32:
                raise _cannot_compute(device, first_line(error)) from error
            right = False
        if right:
            names.append(str(dtype).removeprefix("torch."))
        elif dtype is torch.float32:
            raise _cannot_compute(device, "a 16x16 float32 matmul gave a wrong result")
    return tuple(names)


@cache
def scales_gradients(device: torch.device) -> bool:
    """Whether torch's gradient scaler scales and unscales on the device."""
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(4, device=device, dtype=torch.float32, requires_grad=True)
        try:
            scaler = torch.amp.GradScaler(device.type, init_scale=2.0)
            scaler.scale((weight * 3).sum()).backward()
            scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
        except _REFUSALS:
            return False
        return weight.grad is not None and bool((weight.grad.cpu() == 3).all())


@cache
def fused_optimizer_skips(device: torch.device) -> bool:
    """Whether a fused AdamW steps on the device, and leaves a step alone when told to."""
    try:
        return _weight_after_step(device, bad=1.0) == 1 and _weight_after_step(device, bad=0.0) < 1
    except _REFUSALS:
        return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _matmul_is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Multiply a matrix of ones by itself: 16 and its gradient 32 are exact in every dtype."""
    with torch.inference_mode(False), torch.enable_grad():
        ones = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
        product = ones @ ones
        product.sum().backward()
        assert ones.grad is not None
        return bool((product.cpu() == 16).all()) and bool((ones.grad.cpu() == 32).all())


def _weight_after_step(device: torch.device, bad: float) -> float:
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(4, device=device, dtype=torch.float32, requires_grad=True)
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight], lr=0.5, fused=True)
        flag = torch.full((), bad, device=device, dtype=torch.float32)
        optimizer.found_inf = flag  # type: ignore[attr-defined]  # torch's GradScaler sets it so
        optimizer.step()
        return float(weight.detach().max())


def _cannot_compute(device: torch.device, why: str) -> DeviceBroken:
    return DeviceBroken(
        f"{device} is there and does not compute.",
        why=why,
        fix="repair the device or its driver, or take the CPU on purpose: ANYTRAIN_DEVICE=cpu.",
    )


def wants_bf16_gain(wishes: Wishes, machine: Capabilities) -> bool:
    """Whether a choice hangs on the figure: the precision is free, on a device that may lose."""
    automatic = wishes.precision is not None and wishes.precision.value == "auto"
    return automatic and machine.backend == "cpu" and "bfloat16" in machine.dtypes


def bf16_gain(processor: str) -> Gain:
    """Return how many times as fast as fp32 a step is in bf16, from an earlier run or measured.

    Which instructions a processor has does not tell: some make bfloat16 up out of float32, some
    have it and gain little.
    """
    key = f"{processor}, torch {torch.__version__}"
    path = environment.cache_folder() / "machine.json"
    kept = _read_figures(path)
    try:
        return Gain(float(kept[key]["bf16_gain"]), str(kept[key]["day"]))
    except (KeyError, TypeError, ValueError):
        pass  # not measured yet, or damaged
    found = Gain(round(measure_bf16_gain(), 2), date.today().isoformat())
    _write_figures(path, {**kept, key: {"bf16_gain": found.factor, "day": found.day}})
    return found


def measure_bf16_gain(seconds: float = _SECONDS) -> float:
    """Time forward and backward of two layers in both precisions, by turns; return the ratio.

    The processor's time of one thread is taken: what else runs here hardly changes it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            return _bf16_ratio(_two_layers(), seconds)
    finally:
        torch.set_num_threads(threads)


def _two_layers() -> Callable[[int, bool], None]:
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


def _bf16_ratio(step: Callable[[int, bool], None], seconds: float) -> float:
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


def _read_figures(path: Path) -> dict[str, Any]:
    try:
        found = documents.from_json(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Keep the figures for the next run; where that cannot be, it measures again."""
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(figures, indent=2))
        os.replace(unfinished, path)


def tpu_chips(bus: Path = Path("/sys/bus/pci/devices")) -> tuple[str, ...]:
    """Return the name of each TPU chip on this host; empty where there is none."""
    found = []
    for card in sorted(bus.iterdir()) if bus.is_dir() else []:
        try:
            vendor = (card / "vendor").read_text().strip()
            device = (card / "device").read_text().strip()
        except OSError:
            continue
        if vendor == _GOOGLE and device in _TPU_NAMES:
            found.append(_TPU_NAMES[device])
    return tuple(found)
