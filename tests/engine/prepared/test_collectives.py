"""Which models are taken for such that speak with other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anytrain.engine.prepared.model import meets_other_ranks
from equivalence import twins


def gathered(x: Any) -> Any:
    dist.all_gather([x], x)
    return x


class ByName(nn.Linear):
    def forward(self, x: Any) -> Any:
        return gathered(super().forward(x))


class Spelled(nn.Linear):
    def forward(self, x: Any) -> Any:
        torch.distributed.all_reduce(x)
        return x


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return gathered(x)


class ByFunction(nn.Linear):
    def forward(self, x: Any) -> Any:
        return Gather.apply(x)


class Plain(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x).sum()


@pytest.mark.parametrize("kind", [ByName, Spelled, ByFunction])
def test_a_model_that_gathers_is_found(kind: Any) -> None:
    assert meets_other_ranks(nn.Sequential(nn.Linear(2, 2), kind(2, 2)))


def test_a_model_that_does_not_is_none_though_its_file_could() -> None:
    assert not meets_other_ranks(Plain(2, 2))
    assert not meets_other_ranks(twins.bert())
