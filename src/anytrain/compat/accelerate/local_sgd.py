"""Train for some steps alone, then average the models."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from torch import nn

from anytrain.doors.accelerator import Accelerator
from anytrain.machine.strategies.local_sgd import LocalSGD as Strategy

__all__ = ["LocalSGD"]


class LocalSGD(AbstractContextManager["LocalSGD"]):
    """Inside the block gradients stay local; every `local_sgd_steps` parameters are averaged."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        session = accelerator._session
        self._strategy = Strategy(session.world, session.device, local_sgd_steps)
        self._model = model
        self._enabled = enabled and session.world.size > 1  # averaging one with itself is work
        self._stack = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self._enabled:
            self._stack.enter_context(self._strategy.accumulating(self._model))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if self._enabled and kind is None:
            self._strategy.average(self._model)

    def step(self) -> None:
        """Count one step; average when it is time."""
        if self._enabled:
            self._strategy.end_update(self._model)
