"""Add up what steps leave behind, on the device; the only host read is at a log point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from anytrain.machine.backends import running_sum
from anytrain.machine.backends.running_sum import readable
from anytrain.machine.parallel.world import World


@dataclass(frozen=True, slots=True)
class Reading:
    """What happened since the last log point, over all ranks."""

    num_steps: int
    loss: float
    """The mean of the losses of the steps that were not bad; NaN where all were."""
    grad_norm: float | None
    learning_rate: float
    num_bad: int
    first_bad: int
    """The first bad step since the last log point, counted from 0; -1 where there is none."""


class Meter:
    """Device tensors of the steps since the last log point, added up in place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loss = running_sum.zero(device)
        self._num_bad = running_sum.zero(device)
        self._before_bad = running_sum.zero(device)
        """How many steps there were before the first bad one."""
        self._norm: torch.Tensor | None = None
        self._restart()

    def _restart(self) -> None:
        self.num_steps = 0
        for total in (self._loss, self._num_bad, self._before_bad):
            running_sum.restart(total)
        self._rate: torch.Tensor | float = 0.0

    def add(
        self,
        loss: torch.Tensor,
        grad_norm: torch.Tensor | None,
        rate: torch.Tensor | float,
        bad: torch.Tensor | bool,
        is_summed: bool = False,
    ) -> None:
        """Take one step in, which may have been summed up by itself; nobody waits."""
        if not is_summed:
            self.sum_up(loss, bad)
        self._norm, self._rate = grad_norm, rate
        self.num_steps += 1

    def sum_up(self, loss: torch.Tensor, bad: torch.Tensor | bool) -> None:
        """Add one step to the sums: the device's part, which a recording may hold."""
        # A step that was left out has no part in the mean; it is counted instead.
        if not isinstance(bad, bool):
            running_sum.add(self._loss, torch.where(bad > 0, 0.0, loss))
            running_sum.add(self._num_bad, bad)
            running_sum.add(self._before_bad, self._num_bad == 0)
        elif not bad:
            self._loss.add_(loss)
        else:
            self._num_bad.add_(1)
            self._before_bad.copy_(
                torch.where(self._num_bad == 1, self.num_steps, self._before_bad)
            )

    @property
    def loss(self) -> torch.Tensor:
        """This rank's losses since the last log point, added up; nobody waits."""
        return readable(self._loss)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The last step's norm; nobody waits."""
        return None if self._norm is None else readable(self._norm).detach()

    @property
    def learning_rate(self) -> float:
        """The last step's learning rate; waits for the device."""
        return float(self._rate)

    def num_bad(self) -> int:
        """Return how many steps since the last log point were bad; waits for the device."""
        return int(readable(self._num_bad).item())

    def first_bad(self) -> int:
        """Return the first bad step since the last log point, from 0; waits for the device."""
        return int(self._first_bad().item())

    def _first_bad(self) -> torch.Tensor:
        num_bad, before = readable(self._num_bad), readable(self._before_bad)
        return torch.where(num_bad > 0, before, -1.0)

    def forget_bad(self) -> None:
        """Go on as if the bad steps had not been: they were answered. Waits for the device."""
        self.num_steps -= self.num_bad()
        running_sum.restart(self._num_bad)
        running_sum.put(self._before_bad, torch.tensor(float(self.num_steps)))

    def state_dict(self, world: World) -> dict[str, Any]:
        """Return what was added up since the last log point, each rank's losses among it."""
        return {
            "num_steps": self.num_steps,
            "losses": world.gather(readable(self._loss).clone().reshape(1)),  # it goes on changing
            "bad": torch.stack((readable(self._num_bad), self._first_bad())),
            "rate": self.learning_rate,
        }

    def load_state_dict(self, state: dict[str, Any], world: World) -> None:
        """Go on adding to what was saved; ranks of another number share the losses."""
        self._restart()
        self.num_steps, self._rate, self._norm = state["num_steps"], state["rate"], None
        losses = state["losses"]
        loss = losses[world.rank] if len(losses) == world.size else losses.mean()
        running_sum.put(self._loss, loss)
        num_bad, first_bad = state["bad"].unbind()
        running_sum.put(self._num_bad, num_bad)
        before = torch.where(num_bad > 0, first_bad, float(self.num_steps))
        running_sum.put(self._before_bad, before)

    def read(self, world: World) -> Reading | None:
        """Return the reading and begin anew; None where no step was taken. Waits for the device."""
        if self.num_steps == 0:
            return None
        loss = world.reduce(readable(self._loss), "mean")
        nothing = torch.full((), -1.0, device=loss.device)
        norm_now = nothing if self._norm is None else readable(self._norm).detach()
        told = torch.stack(
            [
                loss,
                readable(self._num_bad).to(loss.dtype),
                self._first_bad().to(loss.dtype),
                norm_now.to(loss.dtype).reshape(()),
            ]
        )
        mean, num_bad, first_bad, norm = (float(value) for value in told.tolist())
        reading = Reading(
            num_steps=self.num_steps,
            loss=mean / good if (good := self.num_steps - int(num_bad)) else math.nan,
            grad_norm=None if self._norm is None else norm,
            learning_rate=self.learning_rate,
            num_bad=int(num_bad),
            first_bad=int(first_bad),
        )
        self._restart()
        return reading


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
