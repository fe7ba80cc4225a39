"""Ranks train alone for some updates, then take the mean of their models.

It leaves the invariant of the other strategies on purpose: between two means, ranks differ. After
each single update of plain SGD the mean is what averaged gradients would have given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from anytrain.core.facts import MemoryForecast, ModelFacts
from anytrain.machine.parallel.world import World
from anytrain.machine.strategies.ddp import DDP


class LocalSGD(DDP):
    """Send no gradients; average the parameters after every `num_updates`.

    A model that was placed by DDP before keeps its gradients to itself while `accumulating`.
    """

    name = "local_sgd"

    def __init__(self, world: World, device: torch.device, num_updates: int = 1) -> None:
        super().__init__(world, device)
        self._num_updates, self._since = num_updates, 0

    def place(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """Return the model itself, with rank 0's weights."""
        if self._world.size > 1:
            with torch.no_grad():
                for value in (*model.parameters(), *model.buffers()):
                    value.copy_(self._world.broadcast(value.detach()))
        return model

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: each rank updates by its own."""

    def end_update(self, model: nn.Module) -> None:
        """Count an update, and take the mean of the ranks' models when it is time."""
        self._since += 1
        if self._since % self._num_updates == 0:
            self.average(model)

    def forecast(self, facts: ModelFacts, options: Mapping[str, Any]) -> MemoryForecast:
        """Return the whole model and optimizer: no gradient is sent."""
        return MemoryForecast(facts.weight_bytes, facts.gradient_bytes, facts.optimizer_bytes)

    def average(self, model: nn.Module) -> None:
        """Give every rank the mean of the ranks' parameters."""
        self._world.barrier("averaging the local models")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(self._world.reduce(parameter.detach(), "mean"))
