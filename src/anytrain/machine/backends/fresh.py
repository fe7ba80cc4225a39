"""Sums that begin at zero, and begin again, without a graph of their own.

Where a device traces, a zero that is made there is part of the graph: the first step after it is
another graph than the next. A zero that comes from the host is an input, as the sum is later, if
it has a dimension: torch_xla makes constants of lone zeros and ones.
"""

from __future__ import annotations

import torch


def zero(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a zero on the device to add to, in a tensor of one element."""
    if device.type == "xla":
        return torch.zeros(1, dtype=dtype).to(device)
    return torch.zeros((), dtype=dtype, device=device)


def restart(total: torch.Tensor) -> None:
    """Make a sum zero again; in place, so that a recorded step finds it."""
    if total.device.type == "xla":
        total.data = zero(total.device, total.dtype)
    else:
        total.zero_()


def readable(value: torch.Tensor) -> torch.Tensor:
    """Return a value where arithmetic on it makes no graph: on the host, if the device traces."""
    return value.cpu().reshape(()) if value.device.type == "xla" else value
