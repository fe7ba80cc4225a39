"""Tell a poisoned tensor before it is saved as good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


def nonfinite(
    tensors: Mapping[str, torch.Tensor], finite: Iterable[str], not_nan: Iterable[str]
) -> tuple[str, str] | None:
    """Return the first tensor that holds a NaN or an infinity it must not, and which it is.

    All are looked at where they are, and the answers are read once.
    """
    ranges: list[tuple[str, torch.Tensor]] = []
    strict = set(finite)
    for name in (*strict, *set(not_nan)):
        tensor = tensors[name]
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            ranges.append((name, _range(tensor)))
    if not ranges:
        return None
    read = torch.stack([pair.to("cpu", torch.float64) for _, pair in ranges])
    for (name, _), bounds in zip(ranges, read, strict=True):
        if bounds.isnan().any():
            return name, "NaN"
        if name in strict and bounds.isinf().any():
            return name, "infinity"
    return None


def _range(tensor: torch.Tensor) -> torch.Tensor:
    """Return the smallest and the largest value; a NaN anywhere makes both NaN."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if plain.dtype.itemsize == 1:  # float8 has no arithmetic
        plain = plain.to(torch.float32)
    return torch.stack(torch.aminmax(plain.detach()))
