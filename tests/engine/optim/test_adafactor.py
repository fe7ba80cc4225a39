"""Adafactor has the numbers of transformers' and loses nothing to a checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.optimization import (
    Adafactor as Theirs,
    AdafactorSchedule as TheirSchedule,
)

from anytrain.core.errors import BadInput, Unsupported
from anytrain.engine.checkpoint.encode import decode, encode
from anytrain.engine.optim.adafactor import Adafactor, AdafactorSchedule

OUTSIDE = {"lr": 3e-2, "scale_parameter": False, "relative_step": False}
CASES: list[dict[str, Any]] = [
    OUTSIDE,
    {**OUTSIDE, "weight_decay": 0.1, "beta1": 0.9},
    {**OUTSIDE, "scale_parameter": True, "clip_threshold": 0.3, "decay_rate": -0.5},
    {},
    {"warmup_init": True, "weight_decay": 0.05},
    {"scale_parameter": False, "beta1": 0.5, "eps": (1e-20, 1e-2)},
]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(6, 5), (5,), (2, 3, 4), (), (1, 7)]
    return [torch.nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in shapes]


def train(optimizer: Any, steps: range, schedule: Any = None) -> list[list[float]]:
    """Walk with gradients that depend on the step and the parameters."""
    rates = []
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for parameter in own:
            noise = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            parameter.grad = parameter.detach() * 0.5 + noise
        optimizer.step()
        if schedule is not None:
            schedule.step()
            rates.append([float(rate) for rate in schedule.get_last_lr()])
    return rates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CASES)
def test_twenty_steps_are_those_of_transformers(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    train(Adafactor(mine, **options), range(20))
    train(Theirs(theirs, **options), range(20))
    close = {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-3}
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, **close)
    if dtype == torch.float32:  # a rate of 1e-6 is lost in a bfloat16 parameter
        assert not torch.equal(mine[0], parameters()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CASES)
def test_a_checkpoint_continues_it_to_the_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    whole = parameters(dtype)
    train(Adafactor(whole, **options), range(12))
    half = parameters(dtype)
    first = Adafactor(half, **options)
    train(first, range(5))
    held = encode(first.state_dict(), "optimizer")
    again = [torch.nn.Parameter(p.detach().clone()) for p in half]
    second = Adafactor(again, **options)
    second.load_state_dict(decode(held.document, held.tensors))
    train(second, range(5, 12))
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_a_loaded_state_is_no_view_of_the_one_given() -> None:
    first, second = Adafactor(parameters(torch.bfloat16)), Adafactor(parameters(torch.bfloat16))
    train(first, range(3))
    state = first.state_dict()
    kept = state["state"][0]["exp_avg_sq_row"].clone()
    second.load_state_dict(state)
    train(second, range(3, 5))
    assert torch.equal(state["state"][0]["exp_avg_sq_row"], kept)


def test_a_state_of_transformers_can_be_taken_over() -> None:
    ours, theirs = parameters(), parameters()
    other = Theirs(theirs, **OUTSIDE)
    train(other, range(4))
    mine = Adafactor(ours, **OUTSIDE)
    mine.load_state_dict(copy.deepcopy(other.state_dict()))
    for own, given in zip(ours, theirs, strict=True):
        own.data.copy_(given.data)
    train(other, range(4, 8))
    train(mine, range(4, 8))
    for own, given in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, given, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"warmup_init": True}, {"scale_parameter": False}])
def test_its_own_rate_can_be_read(options: dict[str, Any]) -> None:
    mine, theirs = Adafactor(parameters(), **options), Theirs(parameters(), **options)
    own, other = AdafactorSchedule(mine, 0.5), TheirSchedule(theirs, 0.5)
    assert own.get_last_lr() == [0.5]
    expected = train(theirs, range(6), other)
    assert train(mine, range(6), own) == [pytest.approx(rates, rel=1e-6) for rates in expected]
    encode(own.state_dict(), "schedule")


def test_a_group_without_parameters_has_its_first_rate() -> None:
    optimizer = Adafactor([{"params": parameters()}, {"params": []}])
    schedule = AdafactorSchedule(optimizer, 0.25)
    assert train(optimizer, range(2), schedule)[-1][1] == 0.25


def test_a_parameter_without_a_gradient_stays() -> None:
    kept, moved = parameters()[:2]
    before = kept.detach().clone()
    optimizer = Adafactor([kept, moved], **OUTSIDE)
    moved.grad = torch.ones_like(moved)
    optimizer.step()
    assert torch.equal(kept, before)
    assert kept not in optimizer.state


def test_a_closure_is_run_with_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Adafactor([weight], **OUTSIDE)

    def closure() -> torch.Tensor:
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert weight[0] < 1


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1},
        {"relative_step": False},
        {"lr": 0.1, "relative_step": False, "warmup_init": True},
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="relative_step"):
        Adafactor(parameters(), **options)


def test_a_sparse_gradient_is_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(Unsupported, match="sparse"):
        Adafactor(table.parameters(), **OUTSIDE).step()
