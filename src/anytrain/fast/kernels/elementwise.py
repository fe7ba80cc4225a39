"""The CUDA kernels for what Llama's like compute element by element: gates, rotary positions."""

from __future__ import annotations

import torch

from anytrain.fast.kernels.step import Kernels

_THREADS = 256
_BYTES = 16
"""That are read at once."""


def _blocks(count: int) -> tuple[int, int]:
    return -(-count // _THREADS), 1


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether it lies on a GPU, where the kernels can read it."""
    return tensor.is_cuda and tensor.numel() > 0 and tensor.data_ptr() % _BYTES == 0


def gate(kernels: Kernels, opens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the SiLU of one bfloat16 matrix times another; see `can_gate`."""
    made = opens.new_empty(opens.shape)
    count = made.numel() // 8
    args = [opens, values, made, count, opens.shape[1], opens.stride(0), values.stride(0)]
    kernels.launch("gate", _blocks(count), args)
    return made


def gate_backward(
    kernels: Kernels, opens: torch.Tensor, values: torch.Tensor, sent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of both, in rows of one tensor where they lie in rows of one."""
    height, width = opens.shape
    is_behind = values.data_ptr() - opens.data_ptr() == width * opens.element_size()
    if is_behind and opens.stride(0) == values.stride(0) == 2 * width:
        made = opens.new_empty(height, 2 * width).split(width, 1)
    else:
        made = torch.empty_like(sent), torch.empty_like(sent)
    count = opens.numel() // 8
    steps = [opens.stride(0), values.stride(0), made[0].stride(0)]
    kernels.launch(
        "gate_backward", _blocks(count), [opens, values, sent, *made, count, width, *steps]
    )
    return made[0], made[1]


def can_gate(matrix: torch.Tensor) -> bool:
    """Whether the kernels can read a bfloat16 matrix's rows."""
    rows_even = matrix.shape[1] % 8 == 0 and matrix.stride() == (matrix.stride(0) // 8 * 8, 1)
    return rows_even and _is_there(matrix)


def rotate(
    kernels: Kernels, inputs: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> torch.Tensor:
    """Return the rows of a bfloat16 tensor turned by angles, in float32; see `can_rotate`."""
    return _turned(kernels, "rotate", inputs, (cosines, sines), torch.float32)


def rotate_backward(
    kernels: Kernels, sent: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> torch.Tensor:
    """Return the bfloat16 gradient of what was turned, from the float32 one of the result."""
    return _turned(kernels, "rotate_backward", sent, (cosines, sines), torch.bfloat16)


def _turned(
    kernels: Kernels,
    name: str,
    read: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, heads, length, width = read.shape
    made = read.new_empty(rows, length, heads, width, dtype=dtype)
    count = made.numel() // 8
    across = 0 if len(angles[0]) == 1 else angles[0].stride(0)
    steps = [*read.stride()[:3], across, angles[0].stride(1)]
    args = [read, *angles, made, count, width, heads, length, *steps]
    kernels.launch(name, _blocks(count), args)
    return made.transpose(1, 2)


def can_rotate(tensor: torch.Tensor) -> bool:
    """Whether the kernels can read the rows of a tensor of rows, heads, places and values."""
    *steps, step = tensor.stride()
    is_even = tensor.shape[-1] % 8 == 0 and all(each % 8 == 0 for each in steps) and step == 1
    return is_even and _is_there(tensor)
