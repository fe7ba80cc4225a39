"""A learning-rate schedule that moves only when the optimizer does."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anytrain.engine.optim.schedule import DeviceRate
from anytrain.engine.prepared.cursor import Cursor
from anytrain.engine.prepared.optimizer import PreparedOptimizer


class PreparedScheduler:
    """A prepared scheduler.

    The schedule was written for one process: unless batches are split, one update over N
    processes has eaten N batches, so it moves N positions.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[PreparedOptimizer],
        cursor: Cursor,
        *,
        positions: int,
        with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.step_with_optimizer = with_optimizer
        self._cursor = cursor
        self._positions = positions
        self._rate: DeviceRate | None = None
        if with_optimizer and _can_follow_device(scheduler, optimizers):
            own = optimizers[0]
            device = own.guard.skipped.device
            self._rate = DeviceRate(own.optimizer, scheduler, self._advance, device)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move on, if this batch ended an update that was not skipped."""
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
        elif not self._cursor.sync:
            if self._cursor.accumulation.adjust_scheduler and hasattr(scheduler, "_step_count"):
                scheduler._step_count += 1
        elif self._rate is not None:
            self._rate.step(self.optimizers[0].guard.skipped)
        else:
            for optimizer in self.optimizers:
                if optimizer.guard.was_skipped():
                    return
            self._advance(*args, **kwargs)

    @property
    def follows_device(self) -> bool:
        """Whether a step has two halves: the host walks ahead, the device follows."""
        return self._rate is not None

    def walk(self) -> None:
        """Take the host's half of a step that the device follows."""
        assert self._rate is not None
        self._rate.walk()

    def follow(self) -> None:
        """Take the device's half of a step: nothing of it happens on the host."""
        assert self._rate is not None
        self._rate.follow(self.optimizers[0].guard.skipped)

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        scheduler = self.scheduler
        for _ in range(self._positions):
            total = getattr(scheduler, "total_steps", None)  # a one-cycle schedule has an end
            if total is None or scheduler._step_count <= total:
                scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state."""
        self._settle()
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scheduler's own state."""
        if self._rate is None:
            self.scheduler.load_state_dict(state_dict)
        else:
            self._rate.restore(lambda: self.scheduler.load_state_dict(state_dict))

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each group."""
        self._settle()
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def _settle(self) -> None:
        if self._rate is not None:
            self._rate.settle()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not yet set: a copy or an unpickled one is being made
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _can_follow_device(scheduler: Any, optimizers: list[PreparedOptimizer]) -> bool:
    """Whether the rate can be a device tensor: a pure schedule of one fused optimizer."""
    if len(optimizers) != 1 or not optimizers[0].guard.decides_on_device:
        return False
    groups = optimizers[0].optimizer.param_groups
    return _is_pure(scheduler) and not any(isinstance(g["lr"], torch.Tensor) for g in groups)


def _is_pure(scheduler: Any) -> bool:
    """Whether it sets nothing but the learning rate, by nothing but the number of its steps."""
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return False
    parts = getattr(scheduler, "_schedulers", [])
    return not getattr(scheduler, "cycle_momentum", False) and all(_is_pure(p) for p in parts)
