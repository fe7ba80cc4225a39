"""Embeddings whose gradient our kernels add up, as far as a CPU shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_for_kernels
from anytrain.fast.shortcuts import embeddings
from anytrain.fast.shortcuts.embeddings import can_look_up, is_embedding


class Table(nn.Module):
    """Words with a head, which may have the words' weights."""

    def __init__(self, *, is_tied: bool = False, **more: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, **more)
        self.head = nn.Linear(8, 11, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(numbers)).float().square().mean()


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Put torch in the kernels' place; note how many rows were added up."""
    torch_for_kernels.put_in(monkeypatch)
    seen: list[int] = []
    own = embeddings.rows_added

    def rows_added(kernels: Any, numbers: Any, *more: Any) -> Any:
        seen.append(len(numbers))
        return own(kernels, numbers, *more)

    monkeypatch.setattr(embeddings, "rows_added", rows_added)
    yield seen


@pytest.mark.parametrize("more", [{}, {"padding_idx": 3}, {"padding_idx": -1}, {"is_tied": True}])
def test_a_table_learns_as_under_autocast(added: list[int], more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, numbers = Table(**more), torch.randint(11, (4, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(numbers).backward()
    right = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with torch_for_kernels.rounded(model, autocast=True) as halves:
        model(numbers).backward()
    assert added == [24]
    for name, parameter in model.named_parameters():
        found = halves.gradient(parameter)
        assert found is not None
        torch.testing.assert_close(found.float(), right[name], rtol=2e-2, atol=2e-4)


def test_what_is_frozen_or_looked_up_too_often_is_torchs(
    added: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, numbers = Table(), torch.randint(11, (4, 6))
    model.words.weight.requires_grad_(False)
    with torch_for_kernels.rounded(model, autocast=True):
        model(numbers).backward()
    assert model.words.weight.grad is None
    model.words.weight.requires_grad_(True)
    monkeypatch.setattr(embeddings, "MOST_LOOKUPS", 23)
    with torch_for_kernels.rounded(model, autocast=True):
        model(numbers).backward()
    assert model.words.weight.grad is not None
    assert added == []


def test_a_row_left_out_by_its_number_from_the_end_gets_no_gradient(added: list[int]) -> None:
    model, numbers = Table(), torch.arange(11)
    model.words.padding_idx = -1
    with torch_for_kernels.rounded(model, autocast=True):
        model(numbers).backward()
    assert model.words.weight.grad is not None
    assert not model.words.weight.grad[-1].any()
    assert model.words.weight.grad[:-1].any(1).all()


def test_which_tables_and_numbers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "are_plain", lambda parameters: True)
    assert is_embedding(nn.Embedding(5, 8))
    for wrong in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        assert not is_embedding(nn.Embedding(5, 8, **wrong))
    assert not is_embedding(nn.Embedding(5, 6))
    assert not is_embedding(nn.Embedding(5, 8192))
    assert not is_embedding(nn.Linear(8, 8))
    table = nn.Embedding(5, 8)
    assert can_look_up(table, torch.zeros(2, 3, dtype=torch.int64))
    assert not can_look_up(table, torch.zeros(2, 3, dtype=torch.int32))
    assert not can_look_up(table, torch.zeros(0, dtype=torch.int64))
    monkeypatch.setattr(embeddings, "are_plain", lambda parameters: False)
    assert not can_look_up(table, torch.zeros(2, 3, dtype=torch.int64))
