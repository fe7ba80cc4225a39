"""The CUDA kernels for what Llama's like compute element by element: gates, rotary positions."""

from __future__ import annotations

import torch

from anytrain.machine.backends.cuda_kernels import Kernels

_THREADS = 256
_BYTES = 16
"""That are read at once."""


def _blocks(count: int) -> tuple[int, int]:
    return -(-count // _THREADS), 1


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether it lies on a GPU, where the kernels can read it."""
    return tensor.is_cuda and tensor.numel() > 0 and tensor.data_ptr() % _BYTES == 0


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's rows one below the other, where they lie."""
    return tensor.flatten(0, -2)


def gate(kernels: Kernels, opens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the SiLU of one bfloat16 tensor times another; see `can_gate`."""
    made = opens.new_empty(opens.shape)
    count, steps = made.numel() // 8, [_rows(tensor).stride(0) for tensor in (opens, values)]
    args = [opens, values, made, count, made.shape[-1], *steps]
    kernels.launch("gate", _blocks(count), args)
    return made


def gate_backward(
    kernels: Kernels, opens: torch.Tensor, values: torch.Tensor, sent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of both, in rows of one tensor where they lie in rows of one."""
    width, steps = sent.shape[-1], [_rows(tensor).stride(0) for tensor in (opens, values)]
    is_behind = values.data_ptr() - opens.data_ptr() == width * opens.element_size()
    if is_behind and steps == [2 * width, 2 * width]:
        made = opens.new_empty(*sent.shape[:-1], 2 * width).split(width, -1)
    else:
        made = torch.empty_like(sent), torch.empty_like(sent)
    count = sent.numel() // 8
    args = [opens, values, sent, *made, count, width, *steps, _rows(made[0]).stride(0)]
    kernels.launch("gate_backward", _blocks(count), args)
    return made[0], made[1]


def can_gate(tensor: torch.Tensor) -> bool:
    """Whether the kernels can read a bfloat16 tensor's rows, one below the other."""
    rows = _rows(tensor)  # a copy of another place, where they do not lie so
    is_even = rows.shape[1] % 8 == 0 and rows.stride(0) % 8 == 0 and rows.stride(1) == 1
    return is_even and rows.data_ptr() == tensor.data_ptr() and _is_there(tensor)


def rotate(
    kernels: Kernels, inputs: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> torch.Tensor:
    """Return the rows of a bfloat16 tensor turned by angles, in float32; see `can_rotate`.

    What is given has heads before places, and what is returned places before heads.
    """
    return _turned(kernels, "rotate", inputs, (cosines, sines), torch.float32)


def rotate_backward(
    kernels: Kernels, sent: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> torch.Tensor:
    """Return the bfloat16 gradient of what was turned, from the float32 one of the result.

    Both have heads before places and after them as in `rotate`.
    """
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
    return made


def can_rotate(tensor: torch.Tensor) -> bool:
    """Whether the kernels can read the rows of a tensor of rows, heads, places and values."""
    *steps, step = tensor.stride()
    is_even = tensor.shape[-1] % 8 == 0 and all(each % 8 == 0 for each in steps) and step == 1
    return is_even and _is_there(tensor)
