"""Sums on a device that begin at zero, begin again, and lose nothing on the way.

Where a device traces, a zero that is made there is part of the graph: the first step after it is
another graph than the next. A zero that comes from the host is an input, as the sum is later, if
it has a dimension: torch_xla makes constants of lone zeros and ones.

torch_xla may hold every float32 in bfloat16, where 256 + 1 is 256. XLA_DOWNCAST_BF16 leaves
float64 wider; XLA_USE_BF16 leaves no wide float, so whole numbers of millionths are summed.
"""

from __future__ import annotations

import torch

from anytrain.core import environment

_UNIT = 2**20


def zero(device: torch.device) -> torch.Tensor:
    """Return a zero on the device to add to, in a tensor of one element."""
    if device.type == "xla":
        narrow = environment.USE_BF16 in environment.narrowing()
        return torch.zeros(1, dtype=torch.int64 if narrow else torch.float64).to(device)
    return torch.zeros((), device=device)


def restart(total: torch.Tensor) -> None:
    """Make a sum zero again; in place, so that a recorded step finds it."""
    if total.device.type == "xla":
        total.data = zero(total.device)
    else:
        total.zero_()


def add(total: torch.Tensor, value: torch.Tensor, times: int | None = None) -> None:
    """Add a value to a sum, or several of it, on the device."""
    scaled = value * _UNIT if total.dtype is torch.int64 else value
    if times is not None and total.device.type == "xla":
        # As a number, one would be a constant of the graph and any other an input of it.
        factor = torch.full((1,), times, dtype=total.dtype).to(total.device)
        total.add_(scaled.to(total.dtype) * factor)
    else:
        total.add_(scaled.to(total.dtype), alpha=1 if times is None else times)


def put(total: torch.Tensor, value: torch.Tensor) -> None:
    """Let a sum go on from a value."""
    if total.device.type == "xla":
        amount = value.double() * (_UNIT if total.dtype is torch.int64 else 1)
        total.data = amount.to(total.dtype).reshape(1).to(total.device)
    else:
        total.copy_(value)


def readable(value: torch.Tensor) -> torch.Tensor:
    """Return a value where arithmetic on it makes no graph: on the host, if the device traces."""
    if value.device.type != "xla":
        return value
    here = value.detach().cpu().reshape(())
    return here.double() / _UNIT if here.dtype is torch.int64 else here
