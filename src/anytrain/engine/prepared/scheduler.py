"""A learning-rate schedule that moves only when the optimizer does."""

from __future__ import annotations

from typing import Any

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

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move on, if this batch ended an update that was not skipped."""
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        if not self._cursor.sync:
            if self._cursor.accumulation.adjust_scheduler and hasattr(scheduler, "_step_count"):
                scheduler._step_count += 1
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        for _ in range(self._positions):
            total = getattr(scheduler, "total_steps", None)  # a one-cycle schedule has an end
            if total is None or scheduler._step_count <= total:
                scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scheduler's own state."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each group."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not yet set: a copy or an unpickled one is being made
            raise AttributeError(name)
        return getattr(self.scheduler, name)
