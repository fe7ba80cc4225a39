"""A learning-rate schedule that moves only when the optimizer does."""

from __future__ import annotations

from typing import Any

from anytrain.doors.accelerator.states import live_session
from anytrain.engine.prepared.optimizer import PreparedScheduler

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler(PreparedScheduler):
    """A prepared scheduler under HF's name, which can be made by hand."""

    _is_accelerate_prepared = True

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        found = live_session()
        super().__init__(
            scheduler,
            list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers],
            found.cursor,
            positions=1 if split_batches else found.world.size,
            with_optimizer=step_with_optimizer,
        )

    def get_lr(self) -> Any:
        """Return the learning rates that the scheduler computes for its position."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Print the learning rate, for schedulers that can."""
        return self.scheduler.print_lr(*args, **kwargs)
