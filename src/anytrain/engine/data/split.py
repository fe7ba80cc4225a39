"""Give each rank its consecutive part of a list, a tensor or a dict of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from anytrain.core.errors import BadInput


def split(inputs: Any, size: int, rank: int, *, pad: bool = False) -> Any:
    """Return this rank's part; with `pad`, short parts repeat the last item.

    >>> split([1, 2, 3, 4, 5], size=2, rank=0), split([1, 2, 3, 4, 5], size=2, rank=1)
    ([1, 2, 3], [4, 5])
    >>> split([1, 2, 3], size=2, rank=1, pad=True)
    [3, 3]

    What is one thing, such as a prompt, is everyone's.

    >>> split("a dog", size=2, rank=1)
    'a dog'
    """
    if size == 1 or isinstance(inputs, str | bytes) or not hasattr(inputs, "__len__"):
        return inputs
    length = _length(inputs)
    each, extra = divmod(length, size)
    start = rank * each + min(rank, extra)
    stop = start + each + (1 if rank < extra else 0)
    longest = each + (1 if extra else 0)
    return _part(inputs, start, stop, longest if pad else 0)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        return len(inputs)
    lengths = {len(value) for value in inputs.values()}
    if len(lengths) != 1:
        raise BadInput(
            f"Cannot split a dict whose values have the lengths {sorted(lengths)}.",
            why="each rank takes the same positions of every value.",
            fix="make the values equally long.",
        )
    return lengths.pop()


def _part(inputs: Any, start: int, stop: int, pad_to: int) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _part(value, start, stop, pad_to) for key, value in inputs.items()}
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):  # datasets.Dataset
        positions = list(range(start, stop))
        positions += [len(inputs) - 1] * (pad_to - len(positions))
        return inputs.select(positions)
    own = inputs[start:stop]
    missing = pad_to - len(own)
    if missing <= 0:
        return own
    if isinstance(own, torch.Tensor):
        return torch.cat([own, inputs[-1:].expand(missing, *inputs.shape[1:])])
    return own + type(own)([inputs[-1]] * missing)
