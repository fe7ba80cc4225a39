"""Tell a poisoned tensor before it is saved as good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


def nonfinite(
    tensors: Mapping[str, torch.Tensor], finite: Iterable[str], not_nan: Iterable[str]
) -> tuple[str, str] | None:
    """Return the first tensor that holds a NaN or an infinity it must not, and which it is.

    Each is looked at where it is, and a device's answers are read once, all together.
    """
    strict, lenient = set(finite), set(not_nan)
    asked: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        known = name in strict or name in lenient
        if known and tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            asked.setdefault(tensor.device, {})[name] = _flags(tensor)
    for flags in asked.values():
        answers = torch.stack(list(flags.values())).tolist()
        for name, (has_nan, has_infinity) in zip(flags, answers, strict=True):
            if has_nan or (has_infinity and name in strict):
                return name, "NaN" if has_nan else "infinity"
    return None


def _flags(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether there is a NaN and whether there is an infinity.

    One pass, and no second tensor of the same size: a NaN anywhere is the least and the greatest.
    """
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
    if plain.dtype.itemsize == 1:  # float8 has no arithmetic
        plain = plain.to(torch.float32)
    ends = torch.stack(torch.aminmax(plain))
    return torch.stack([ends.isnan().any(), ends.isinf().any()])
