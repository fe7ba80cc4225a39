"""The mean loss of an evaluation, added up where the losses are."""

from __future__ import annotations

import torch

from anytrain.machine.backends import fresh
from anytrain.machine.parallel.world import World


class LossMean:
    """A mean of batch losses, each weighing as many rows as it was taken over."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._rows = 0

    def add(self, loss: torch.Tensor, rows: int) -> None:
        """Add the mean loss of `rows` rows, without reading it; one of no rows counts nothing."""
        if rows == 0:
            return
        loss = loss.detach().mean()  # a replicated model may give one loss a replica
        if self._sum is None:
            self._sum = _zero(loss.device)
        fresh.add(self._sum, loss, rows)
        self._rows += rows

    def value(self, world: World) -> float | None:
        """Return the mean over every rank's rows; None where there are none.

        Every rank must ask. It is the first time that the device is read.
        """
        own = 0.0 if self._sum is None else float(fresh.readable(self._sum))
        both = torch.tensor([own, float(self._rows)], dtype=torch.float64)
        total, rows = world.reduce(both, "sum").tolist()
        return total / rows if rows else None


def _zero(device: torch.device) -> torch.Tensor:
    """Return a zero to add to: in float64, or in float32 where the device has no other."""
    if device.type == "xla":
        return fresh.zero(device)
    try:
        return torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.zeros((), dtype=torch.float32, device=device)
