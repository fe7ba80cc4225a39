from __future__ import annotations

import pytest
import torch

from anytrain.core.errors import DeviceBroken
from anytrain.machine.backends import capabilities

CPU = torch.device("cpu")


def test_dtypes_are_found_by_computing_even_where_gradients_are_off() -> None:
    capabilities.working_dtypes.cache_clear()
    with torch.inference_mode():
        assert capabilities.working_dtypes(CPU) == ("float32", "bfloat16", "float16", "float64")


def test_a_device_that_computes_nothing_is_broken_and_asked_again() -> None:
    # A meta tensor has no values: whatever it computes cannot be read back.
    for _ in range(2):
        with pytest.raises(DeviceBroken, match="meta is there and does not compute") as caught:
            capabilities.working_dtypes(torch.device("meta"))
        assert "ANYTRAIN_DEVICE=cpu" in caught.value.fix


def test_a_fused_optimizer_and_a_scaler_are_found_by_trying() -> None:
    assert capabilities.fused_optimizer_skips(CPU)
    assert capabilities.scales_gradients(CPU)
    assert not capabilities.fused_optimizer_skips(torch.device("meta"))


def test_a_fused_optimizer_that_ignores_the_flag_does_not_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Deaf(torch.optim.AdamW):
        """Steps whatever it is told, as torch's fused AdamW on mps did before 2.13."""

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            del self.found_inf
            super().step()

    monkeypatch.setattr(torch.optim, "AdamW", Deaf)
    capabilities.fused_optimizer_skips.cache_clear()
    try:
        assert not capabilities.fused_optimizer_skips(CPU)
    finally:
        capabilities.fused_optimizer_skips.cache_clear()
