"""Masks drawn the quick way are as random as torch's, and come from its generator."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from anytrain.machine.backends.cpu import quick_dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("p", [0.0, 0.0001, 0.1, 0.5, 0.9, 0.9999, 1.0])
def test_each_value_is_one_with_its_probability(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with quick_dropout():
        found = torch.empty(400, 1001, dtype=dtype).t().bernoulli_(p).double()
    assert set(found.unique().tolist()) <= {0.0, 1.0}
    spread = (p * (1 - p) / found.numel()) ** 0.5
    assert abs(found.mean().item() - p) <= 5 * spread
    if 0 < p < 1:  # neighbours, which share a number, have nothing to do with each other
        flat = found.t().flatten() - p
        for distance in (1, 2, 3, 4, 1001):
            together = (flat[distance:] * flat[:-distance]).mean().item()
            assert abs(together) <= 5 * p * (1 - p) / flat.numel() ** 0.5


def test_dropout_follows_the_seed_and_the_generators_state() -> None:
    rows = torch.ones(33, 7)
    with quick_dropout():
        torch.manual_seed(3)
        first = functional.dropout(rows, 0.25)
        state = torch.get_rng_state()
        second = functional.dropout(rows, 0.25)
        torch.set_rng_state(state)
        assert torch.equal(functional.dropout(rows, 0.25), second)
        torch.manual_seed(3)
        assert torch.equal(functional.dropout(rows, 0.25), first)
        generator = torch.Generator().manual_seed(5)
        own = torch.empty(64).bernoulli_(0.5, generator=generator)
        assert torch.equal(torch.empty(64).bernoulli_(0.5, generator=generator.manual_seed(5)), own)
    assert not torch.equal(first, second)
    assert first.unique().tolist() == [0.0, pytest.approx(4 / 3)]


def test_torchs_own_draws_are_back_after_the_block_and_after_an_error() -> None:
    def drawn() -> torch.Tensor:
        torch.manual_seed(1)
        return torch.empty(1000).bernoulli_(0.3)

    before = drawn()
    with pytest.raises(ZeroDivisionError), quick_dropout():
        assert not torch.equal(drawn(), before)
        raise ZeroDivisionError
    assert torch.equal(drawn(), before)
    with quick_dropout():
        assert not torch.equal(drawn(), before)
    assert torch.equal(drawn(), before)


def test_attention_and_gradients_run_with_quick_masks() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 3, 5, 8, requires_grad=True)
    with quick_dropout():
        out = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        out.sum().backward()
    assert query.grad is not None
    assert torch.isfinite(query.grad).all()
