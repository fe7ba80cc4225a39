"""Rows in one are to a model what they were apart."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from anytrain.core.errors import BadInput
from anytrain.engine import objective
from anytrain.engine.data.packing import Packed, packed_lengths, why_rows_mix
from equivalence import twins


def ragged(count: int) -> twins.Rows:
    """Rows of 3 to 11 words whose labels are their words."""
    return [
        {name: value[: 3 + number % 9] for name, value in row.items()}
        for number, row in enumerate(twins.texts(count, 12))
    ]


def model(make: Any, attention: str = "sdpa") -> Any:
    made: Any = make()
    made.config.use_cache = False
    made.set_attn_implementation(attention)
    return made


MODELS = [
    (twins.gpt2, "sdpa"),
    (twins.gpt2, "eager"),
    (twins.llama, "sdpa"),
    (twins.llama, "eager"),
]


@pytest.mark.parametrize(("make", "attention"), MODELS)
@pytest.mark.parametrize("lengths", [(), (80, 96), (300,)])
def test_packed_rows_have_the_loss_and_gradients_of_padded_ones(
    make: Any, attention: str, lengths: tuple[int, ...]
) -> None:
    some = model(make, attention)
    rows = ragged(10)
    found = []
    for batch in (twins.pad(rows), Packed(twins.pad, lengths)(rows)):
        some.zero_grad()
        loss = some(**batch).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in some.named_parameters()}
        found.append((loss.detach(), objective.num_items(batch, shifted=True), grads))
    (loss, items, grads), (packed_loss, packed_items, packed_grads) = found
    torch.testing.assert_close(packed_loss, loss)
    assert packed_items == items
    for name, grad in grads.items():
        torch.testing.assert_close(packed_grads[name], grad, atol=1e-6, rtol=1e-4)


def test_positions_begin_anew_and_first_labels_do_not_count() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [5, 6, 7]},
        {"input_ids": [8, 9], "attention_mask": [1, 1], "labels": [8, 9]},
    ]
    batch = Packed(twins.pad, (8,), {"input_ids": 3})(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 3, 3, 3]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert "attention_mask" not in batch


def test_padding_on_the_left_is_left_out_too() -> None:
    padded = {
        "input_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "labels": torch.tensor([[-100, 5, 6], [7, 8, 9]]),
    }
    batch = Packed(lambda features: padded, (5,))([])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, 9]]


@pytest.mark.parametrize("lacking", ["labels", "attention_mask"])
def test_a_batch_without_labels_or_mask_is_refused(lacking: str) -> None:
    rows = [{k: v for k, v in row.items() if k != lacking} for row in ragged(3)]
    with pytest.raises(BadInput, match="Cannot pack"):
        Packed(twins.pad)(rows)


def test_a_batch_with_one_class_a_row_is_refused() -> None:
    with pytest.raises(BadInput, match="'labels' has no value for each token"):
        Packed(twins.pad)(twins.sentences(3))


def test_few_lengths_hold_every_batch() -> None:
    lengths = np.random.default_rng(1).integers(5, 100, 500)
    found = packed_lengths(lengths, 8)
    totals = np.random.default_rng(2).permutation(lengths)[:496].reshape(-1, 8).sum(1)
    assert len(found) <= 4
    assert (totals <= found[-1] * 1.2).all()
    assert packed_lengths(np.array([3, 4]), 8) == (64,)


class Ignores(nn.Module):
    """A model that has positions and does not look at those given."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(8, 8), nn.Embedding(16, 8)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return (self.words(input_ids) + self.places(torch.arange(input_ids.shape[1])),)


def _bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2)
    return transformers.BloomForCausalLM(config)


@pytest.mark.parametrize(("make", "attention"), MODELS)
def test_a_model_that_keeps_rows_apart_is_known_by_trying(make: Any, attention: str) -> None:
    some = model(make, attention)
    some.lm_head.eval()
    before = torch.get_rng_state()
    assert why_rows_mix(some, nullcontext, is_exact=True) is None
    assert torch.equal(before, torch.get_rng_state())
    assert not some.lm_head.training
    assert some.training is False or some.base_model.training


def test_a_model_that_mixes_rows_is_known_by_trying() -> None:
    assert "mixes rows" in str(why_rows_mix(_bloom(), nullcontext, is_exact=True))
    some = model(twins.gpt2)
    some.config.use_cache = True
    assert "mixes rows" in str(why_rows_mix(some, nullcontext, is_exact=True))
    assert "anew" in str(why_rows_mix(Ignores(), nullcontext, is_exact=True))
    failed = why_rows_mix(nn.Linear(2, 2), nullcontext, is_exact=True)
    assert failed is not None
    assert failed.startswith("it failed on two rows in one")
