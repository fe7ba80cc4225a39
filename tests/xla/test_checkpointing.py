"""Gradient checkpointing on torch_xla draws the same numbers when it computes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anytrain import Accelerator
from anytrain.doors.trainer.outputs import set_seed


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, again: bool | None) -> Any:
        hidden = self.first(x).relu()
        if again is None:
            hidden = self._part(hidden)
        else:
            hidden = checkpoint(self._part, hidden, use_reentrant=again)
        return self.last(self.drop(hidden))

    def _part(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drop(self.drop(hidden) * 2)


def _gradients(again: bool | None) -> list[torch.Tensor]:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model: Any = accelerator.prepare(_Dropping())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(accelerator.device)
    found = []
    set_seed(3)
    for _ in range(2):
        model.zero_grad()
        accelerator.backward(model(x, again).square().sum())
        found += [parameter.grad.cpu() for parameter in model.parameters()]
    return found


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_is_the_same_when_a_part_is_computed_again(reentrant: bool) -> None:
    for ours, plain in zip(_gradients(reentrant), _gradients(None), strict=True):
        torch.testing.assert_close(ours, plain)
