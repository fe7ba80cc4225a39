"""What a real GPU's allocator says when it has no memory left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from anytrain.machine.processes import crashes

pytestmark = pytest.mark.gpu

FILL = """
import torch
held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
RECORDED
allocated = torch.cuda.memory_allocated()
try:
    torch.empty(2**50, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(allocated)
    print(f"OutOfMemoryError: {error}")
"""
RECORDED = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    held.float().add(1).sum()
"""


def explained(script: str) -> tuple[int, list[str]]:
    """Return what tensors held in a process of its own, and what its last error is told as."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    allocated, _, message = done.stdout.partition("\n")
    told = crashes.explain_device_memory(message)
    assert told is not None
    return int(allocated), told.splitlines()


def test_the_allocators_own_words_are_understood() -> None:
    allocated, (first, second, _) = explained(FILL.replace("RECORDED", ""))
    assert "has no memory left: 1048576.00 GiB more were asked for, " in first
    assert f"tensors hold {allocated / 2**20:.2f} MiB; " in second


def test_the_memory_of_recorded_steps_is_named() -> None:
    _, (_, second, _) = explained(FILL.replace("RECORDED", RECORDED))
    assert " of it for recorded steps; " in second
