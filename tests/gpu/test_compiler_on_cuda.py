"""CUDA's compiler makes kernels for the GPU, and what it says of a fault is passed on."""

from __future__ import annotations

import pytest
import torch

from anytrain.fast.kernels import nvrtc

pytestmark = pytest.mark.gpu

KERNEL = 'extern "C" __global__ void step_one(float* to) { to[threadIdx.x] = 1; }'


def filled(binary: bytes) -> list[float]:
    """Return what the kernel leaves of three zeros."""
    from torch.cuda import _utils

    made = torch.zeros(3, device="cuda")
    _utils._cuda_load_module(binary, ["step_one"])["step_one"]((1, 1, 1), (3, 1, 1), (made,))
    return made.tolist()


@pytest.mark.parametrize("option", ["--split-compile=0", "--of-a-compiler-to-come"])
def test_kernels_are_compiled_for_the_gpu(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr(nvrtc, "_ON_ALL_CORES", option)
    assert filled(nvrtc.compiled(KERNEL, torch.cuda.get_device_capability())) == [1, 1, 1]


def test_what_the_compiler_says_of_a_fault_is_passed_on() -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        nvrtc.compiled(KERNEL.replace("= 1", "= nowhere"), torch.cuda.get_device_capability())
