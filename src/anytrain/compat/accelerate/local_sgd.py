"""Train for some steps alone, then average the models."""

from __future__ import annotations

from torch import nn

from anytrain.doors.accelerator import Accelerator
from anytrain.engine.prepared.local_sgd import LocalAveraging

__all__ = ["LocalSGD"]


class LocalSGD(LocalAveraging):
    """Inside the block gradients stay local; every `local_sgd_steps` parameters are averaged."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        super().__init__(accelerator._session.world, model, local_sgd_steps, enabled)
