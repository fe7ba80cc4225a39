from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from anytrain.engine.step.guard import bound
from anytrain.machine.strategies.solo import norm as measure


def trained(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    (model(torch.randn(4, 7)).square().mean() * scale).backward()
    return model


def norm_of(model: nn.Module) -> float:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return float(nn.utils.get_total_norm(grads))


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9989, 0.99999, 1.0, 1.00001, 1.5, 100.0])
def test_gradients_are_bounded_to_the_bit_as_torch_bounds_them(share: float) -> None:
    ours = trained()
    theirs, max_norm = copy.deepcopy(ours), norm_of(ours) * share
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.grad = one.grad.clone()
    norm = bound(list(ours.parameters()), max_norm, measure, can_read=True)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_gives_such_a_norm(bad: float) -> None:
    model = trained()
    model[0].weight.grad[0, 0] = bad
    assert not torch.isfinite(bound(list(model.parameters()), 1.0, measure, can_read=True))


def test_a_bound_of_0_measures_and_changes_nothing() -> None:
    model = trained()
    before = [p.grad.clone() for p in model.parameters()]
    assert float(bound(list(model.parameters()), 0.0, measure, can_read=True)) == norm_of(model)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("can_read", [False, True])
def test_other_gradients_go_torchs_way(can_read: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    for parameter in list(model.parameters())[:-1]:
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = bound(list(model.parameters()), 1.0, measure, can_read=can_read)
    assert float(norm) > 1
    assert norm_of(model) == pytest.approx(1.0, rel=1e-2)
