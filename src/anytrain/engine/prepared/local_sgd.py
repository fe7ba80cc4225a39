"""Train for some steps alone, then average the models."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

import torch
from torch import nn

from anytrain.machine.parallel.world import World


class LocalAveraging(AbstractContextManager["LocalAveraging"]):
    """Inside the block gradients stay local; every `num_steps` the parameters are averaged."""

    def __init__(self, world: World, model: nn.Module, num_steps: int, enabled: bool) -> None:
        self._world = world
        self._model = model
        self._every = num_steps
        self._enabled = enabled and world.size > 1  # averaging one model with itself is work
        self._since = 0
        self._stack = ExitStack()

    def __enter__(self) -> LocalAveraging:
        if self._enabled:
            self._stack.enter_context(self._world.no_sync(self._model))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if self._enabled and kind is None:
            self._average()

    def step(self) -> None:
        """Count one step; average when it is time."""
        self._since += 1
        if self._enabled and self._since % self._every == 0:
            self._average()

    def _average(self) -> None:
        self._world.barrier("averaging the local models")
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(self._world.reduce(parameter.detach(), "mean"))
