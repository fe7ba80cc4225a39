"""What is recorded of a step on a GPU makes nobody wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from anytrain.engine.recording.fingerprint import describe
from anytrain.engine.recording.meter import Padding

pytestmark = pytest.mark.gpu


@pytest.fixture
def nobody_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("nobody_waits")
def test_padding_is_counted_without_a_wait_and_read_at_the_log_point() -> None:
    words = torch.zeros(4, 8, dtype=torch.long, device="cuda")
    mask = torch.zeros(4, 8, dtype=torch.long, device="cuda")
    mask[:, :6] = 1
    padding = Padding(is_on=True)
    padding.look(words, mask)
    assert not padding.is_due
    torch.cuda.set_sync_debug_mode("default")
    padding.read()
    assert padding.share == 0.25


@pytest.mark.usefixtures("nobody_waits")
def test_data_on_the_device_is_described_without_reading_it() -> None:
    found = describe(torch.utils.data.TensorDataset(torch.zeros(4, 8, device="cuda")))
    assert found["num_rows"] == 4
