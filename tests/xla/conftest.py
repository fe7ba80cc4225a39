"""torch_xla for real, on the CPU: `make test-xla` has the environment for it."""

from __future__ import annotations

import pytest

from anytrain.core.facts import NotFound
from anytrain.machine.backends import probe


@pytest.fixture(autouse=True)
def _on_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = probe.get("xla").probe()
    if isinstance(answer, NotFound):
        pytest.skip(f"{answer.because}; `make test-xla` runs these")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("ANYTRAIN_DEVICE", "xla")
    probe.get("xla").device(0)  # before any backward pass, even one on the CPU
