"""Attention masks in a recording, told from what transformers asks while it pretends to be in one.

That a real recording takes the same kernels is in tests/gpu/test_attention_on_cuda.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import masking_utils

from anytrain.fast.shortcuts.attention import Masks
from equivalence import twins


@pytest.fixture
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Note the masks that attention is given."""
    attend, masks = functional.scaled_dot_product_attention, []

    def noting(*args: Any, attn_mask: Any = None, **more: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **more)

    with monkeypatch.context() as patched:
        patched.setattr(functional, "scaled_dot_product_attention", noting)
        yield masks


def ids() -> torch.Tensor:
    return torch.arange(16).view(2, 8) + 5


@pytest.mark.usefixtures("_captures")
def test_a_mask_that_is_not_there_has_no_values_to_look_at():
    own = masking_utils.is_tracing
    with Masks().recorded([]):
        assert not masking_utils.is_tracing(None)
        assert masking_utils.is_tracing(torch.ones(1))
        assert masking_utils.is_tracing()
    assert masking_utils.is_tracing is own


@pytest.mark.usefixtures("_captures")
@pytest.mark.parametrize("make", [twins.bert, twins.gpt2])
def test_a_batch_without_a_mask_is_recorded_without_one(make, monkeypatch):
    model = make(dropout=0.0)
    model.config.use_cache = False
    with noted(monkeypatch) as masks, Masks().recorded([ids()]):
        model(input_ids=ids())
    assert masks and all(mask is None for mask in masks)


@pytest.mark.usefixtures("_captures")
def test_a_batch_with_a_mask_is_recorded_with_it(monkeypatch):
    seen = torch.ones(2, 8, dtype=torch.int64)
    with noted(monkeypatch) as masks, Masks().recorded([ids(), seen]):
        twins.bert(dropout=0.0)(input_ids=ids(), attention_mask=seen)
    assert masks and all(mask is not None for mask in masks)


def rows_of_two_texts() -> torch.Tensor:
    return torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])


@pytest.mark.parametrize("shared", [True, False])
def test_texts_that_share_a_row_stay_apart(shared, monkeypatch):
    positions, model, masks = rows_of_two_texts(), twins.gpt2(dropout=0.0), Masks()
    model.config.use_cache = False
    if not shared:
        positions = positions.repeat(2, 1)
    with masks.observed():
        expected = model(input_ids=ids(), position_ids=positions).logits
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with masks.recorded([ids()]):
        found = model(input_ids=ids(), position_ids=positions).logits
    torch.testing.assert_close(found, expected)


def test_positions_of_the_batch_are_not_taken_for_the_models_own(monkeypatch):
    positions, model, masks = rows_of_two_texts(), twins.gpt2(dropout=0.0), Masks()
    model.config.use_cache = False
    expected = model(input_ids=ids(), position_ids=positions).logits
    with masks.observed():
        model(input_ids=ids(), position_ids=torch.arange(8)[None])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with masks.recorded([ids(), positions]):
        found = model(input_ids=ids(), position_ids=positions).logits
    torch.testing.assert_close(found, expected)
