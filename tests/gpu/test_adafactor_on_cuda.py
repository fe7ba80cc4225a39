"""Adafactor with a rate from outside never waits for the device, and agrees with the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anytrain.engine.optim.adafactor import Adafactor

pytestmark = pytest.mark.gpu
OUTSIDE: dict[str, Any] = {
    "lr": 0.02,
    "scale_parameter": False,
    "relative_step": False,
    "weight_decay": 0.1,
}


def trained(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw) for shape in ((8, 6), (6,), (2, 3, 4))]
    slopes = [torch.randn((5, *value.shape), generator=draw) for value in start]
    parameters = [torch.nn.Parameter(value.to(device, dtype)) for value in start]
    moved = [slope.to(device, dtype) for slope in slopes]
    optimizer = Adafactor(parameters, **OUTSIDE)
    waits = "error" if device == "cuda" else "default"
    torch.cuda.set_sync_debug_mode(waits)
    try:
        for step in range(5):
            for parameter, slope in zip(parameters, moved, strict=True):
                parameter.grad = slope[step]
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [parameter.detach().cpu() for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_steps_wait_for_nothing_and_agree_with_the_cpu(dtype: torch.dtype) -> None:
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for own, other in zip(trained("cuda", dtype), trained("cpu", dtype), strict=True):
        torch.testing.assert_close(own, other, **close)
