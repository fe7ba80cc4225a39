"""Our own CUDA kernels, compiled by the driver's compiler when they are first wanted.

That takes a fraction of a second and needs no toolkit. They work on all of a model's tensors in
one launch: torch's own need several, and a pass over the gradients for each question.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch

_NAMES = ("squares", "norm", "adam", "count", "halve", "column_sums")
_PREFIX = "step_"  # CUDA has functions of its own of such names
_CHUNK = 16384
_THREADS = 256
_COLUMNS = 256
_BLOCKS = 264
"""Enough blocks to fill a large GPU twice."""
ROW = 8


class Kernels:
    """The kernels of one GPU; they are compiled behind the run that will want them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[str, Any] | None = None
        self.problem: str | None = None
        """Why they are not there."""
        self._thread = threading.Thread(target=self._compile, name="anytrain-nvrtc", daemon=True)
        self._thread.start()

    def _compile(self) -> None:
        try:
            from torch.cuda import _utils

            torch.cuda.set_device(self._device)
            source = resources.files("anytrain.machine.backends").joinpath("cuda_step.cu")
            names = [_PREFIX + name for name in _NAMES]
            binary, _ = _utils._nvrtc_compile(source.read_text(), names[0])
            self._found = _utils._cuda_load_module(binary, names)  # type: ignore[assignment]
        except Exception as error:  # noqa: BLE001  torch's own kernels do it all too, slower
            self.problem = str(error)

    def are_there(self) -> bool:
        """Whether they can be used; waits for the compiler."""
        self._thread.join()
        return self._found is not None

    def launch(self, name: str, grid: tuple[int, int], args: Sequence[Any]) -> None:
        """Start a kernel on the current stream."""
        assert self._found is not None
        self._found[_PREFIX + name](grid=(*grid, 1), block=(_THREADS, 1, 1), args=list(args))


def chunks_of(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return for each block its tensor and the part of it that it works on."""
    pairs = [
        (tensor, part) for tensor, count in enumerate(counts) for part in range(-(-count // _CHUNK))
    ]
    return torch.tensor(pairs, dtype=torch.int32).to(device)


def column_sums(kernels: Kernels, matrix: torch.Tensor, scratch: tuple[Any, Any]) -> torch.Tensor:
    """Return the sum of a bfloat16 matrix's rows; its width is a multiple of 8."""
    height, width = matrix.shape
    blocks = -(-width // _COLUMNS)
    slices = max(1, min(-(-_BLOCKS // blocks), height // 16))
    parts, done = scratch
    result = matrix.new_empty(width)
    kernels.launch(
        "column_sums", (blocks, slices), [matrix, result, parts, done, height, width, slices]
    )
    return result


def scratch_for(width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `column_sums` needs for matrices up to this width."""
    blocks = -(-width // _COLUMNS)
    parts = torch.empty((_BLOCKS + blocks) * _COLUMNS, device=device)
    return parts, torch.zeros(blocks, dtype=torch.int32, device=device)
