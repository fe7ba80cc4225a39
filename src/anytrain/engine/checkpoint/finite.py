"""Tell a poisoned tensor before it is saved as good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

_ALONE_BYTES = 1 << 20
"""Up to here one thread is done before torch's have met, the more so where other programs keep
the cores busy: 60 ms for a model of 500 KB then."""
_KNOWN_TO_NUMPY = (torch.float16, torch.float32, torch.float64)


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
    ends = _ends(plain)
    return torch.stack([ends.isnan().any(), ends.isinf().any()])


def _ends(plain: torch.Tensor) -> torch.Tensor:
    is_here = plain.device.type == "cpu" and plain.dtype in _KNOWN_TO_NUMPY
    if is_here and plain.nbytes <= _ALONE_BYTES:
        values = plain.detach().resolve_neg().numpy()
        return torch.tensor([values.min().item(), values.max().item()], dtype=torch.float64)
    return torch.stack(torch.aminmax(plain))
