"""What a real GPU's allocator says when it has no memory left."""

from __future__ import annotations

import gc

import pytest
import torch

from anytrain.machine.processes import device_memory

pytestmark = pytest.mark.gpu


def test_the_allocators_own_words_are_understood():
    gc.collect()  # what earlier tests have left goes now, not in between
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    allocated = torch.cuda.memory_allocated()  # afterwards less: full, torch frees workspaces
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    told = device_memory.explain(f"OutOfMemoryError: {caught.value}")
    assert told is not None
    first, second, _ = told.splitlines()
    assert "has no memory left: 1048576.00 GiB more were asked for, " in first
    assert f"tensors hold {allocated / 2**20:.2f} MiB" in second
    assert held.numel() == 2**28
