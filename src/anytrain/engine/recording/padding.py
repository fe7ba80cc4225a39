"""Find out how much of the batches is padding, without a cost that anybody could measure."""

from __future__ import annotations

import torch


class Padding:
    """The share of padding, from one batch between two log points.

    The batch is counted on its device, and the count is read at the log point, where the run waits
    for the device anyway. A device that traces is left alone: one op more would be a new graph.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = self.is_due = is_on
        """`is_due`: whether the next batch is to be looked at."""
        self._held: tuple[torch.Tensor, int] | None = None
        self._num_real = self._num_all = 0

    @property
    def share(self) -> float | None:
        """Padding among what was looked at, from 0 to 1; None where nothing tells."""
        return 1 - self._num_real / self._num_all if self._num_all else None

    def look(self, main: torch.Tensor, mask: object) -> None:
        """Count a batch by its mask; one without a mask of its shape says nothing."""
        self.is_due = False
        if isinstance(mask, torch.Tensor) and mask.shape == main.shape and mask.ndim > 1:
            self._held = (mask.count_nonzero(), mask.numel())

    def read(self) -> None:
        """Take the count over; waits for the device."""
        if self._held is not None:
            count, whole = self._held
            self._num_real, self._num_all = self._num_real + int(count), self._num_all + whole
            self._held = None
        self.is_due = self._is_on
