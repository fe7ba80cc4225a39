"""One process has the whole model and the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from anytrain.machine.parallel.world import World


def norm(gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of gradients that are all here, as torch.nn.utils computes it."""
    if norm_type == 2.0 and _are_plain(gradients):  # the same few calls, without the sorting
        whole: torch.Tensor = torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(list(gradients)))
        )
        return whole
    return torch.nn.utils.get_total_norm(gradients, norm_type)


def _are_plain(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether these are dense float32 values in host memory."""
    return bool(gradients) and all(
        grad.is_cpu
        and grad.dtype is torch.float32
        and grad.layout is torch.strided
        and not grad.requires_grad
        for grad in gradients
    )


class Solo:
    """Train alone: nothing is shared, and nobody is waited for."""

    name = "solo"

    def __init__(self, world: World, device: torch.device) -> None:
        pass

    def place(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """Return the model itself."""
        return model

    def original(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: there is nobody to send gradients to."""
        return nullcontext()

    def share_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: there is nobody to average with."""
        return nullcontext()

    def end_backward(self, model: nn.Module) -> str | None:
        """Return None: one process has its gradients."""
        return None

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: the mean of one is itself."""

    def norm(self, gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of these gradients together."""
        return norm(gradients, norm_type)

    def end_update(self, model: nn.Module) -> None:
        """Do nothing: the update is all there is."""

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Do nothing: nobody else runs out."""
        return nullcontext()
