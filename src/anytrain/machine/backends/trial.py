"""Find out what a device can do by making it do it.

Tables of what a chip or a torch version "should" support go stale: torch 2.11's fused AdamW on
mps runs, and ignores the flag that tells it to skip a step. Each answer is kept for the process.
"""

from __future__ import annotations

from functools import cache

import torch

from anytrain.core.errors import DeviceBroken

_CANDIDATES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A missing kernel raises NotImplementedError (a RuntimeError), a missing dtype TypeError.
_REFUSALS = (RuntimeError, TypeError)


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
