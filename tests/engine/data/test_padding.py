"""Batches in a few shapes, with the right fill in every place."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from transformers import (
    BertTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)

from anytrain.core.errors import BadInput
from anytrain.engine.data.padding import ToBuckets


def tokenizer(side: str = "right") -> Any:
    words = ["[UNK]", "a", "b", "[CLS]", "[SEP]", "[MASK]", "c", "[PAD]"]
    made = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    made.padding_side = side
    assert made.pad_token_id == 7
    return made


def rows(*sizes: int, **more: Any) -> list[dict[str, Any]]:
    found = []
    for size in sizes:
        row = {name: make(size) for name, make in more.items()}
        found.append({"input_ids": [1] * size, "attention_mask": [1] * size, **row})
    return found


def to_buckets(collate: Any, lengths: tuple[int, ...] = (4, 8, 16), **more: Any) -> ToBuckets:
    return ToBuckets(collate, lengths, fills={"input_ids": 7}, **more)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_tokenizers_padding_goes_on_on_its_side(side: str) -> None:
    text = rows(3, 6, token_type_ids=lambda size: [1] * size)
    collate = DataCollatorWithPadding(tokenizer(side))
    batch = to_buckets(collate, left=side == "left")(text)
    wanted = DataCollatorWithPadding(tokenizer(side), padding="max_length", max_length=8)(text)
    assert set(batch) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(batch[name], value)


def test_tokens_labels_are_padded_with_what_no_loss_counts() -> None:
    text = rows(3, 5, labels=lambda size: [2] * size)
    batch = to_buckets(DataCollatorForTokenClassification(tokenizer()))(text)
    assert batch["labels"].tolist() == [[2] * 3 + [-100] * 5, [2] * 5 + [-100] * 3]
    assert batch["attention_mask"].sum(1).tolist() == [3, 5]


def test_a_language_models_labels_are_padded_too() -> None:
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    batch = to_buckets(collate)(rows(3, 5))
    assert batch["labels"].shape == batch["input_ids"].shape == (2, 8)
    assert (batch["labels"] == -100).sum() == 8


def test_targets_of_another_length_get_one_length_for_each_of_the_inputs() -> None:
    collate = DataCollatorForSeq2Seq(tokenizer())
    shapes = set()
    for sizes in ((3, 6), (5, 5), (7, 8), (2, 3)):
        text = rows(*sizes, labels=lambda size: [1] * (size // 2))
        batch = to_buckets(collate, target_lengths=(3, 5, 9))(text)
        shapes.add((batch["input_ids"].shape, batch["labels"].shape))
    assert shapes == {((2, 8), (2, 5)), ((2, 4), (2, 3))}


def test_targets_as_long_as_the_inputs_by_chance_keep_their_own_length() -> None:
    text = rows(6, 6, labels=lambda size: [1] * size)
    batch = to_buckets(DataCollatorForSeq2Seq(tokenizer()), target_lengths=(3, 7, 9))(text)
    assert batch["labels"].shape == (2, 7)


def test_scores_of_as_many_classes_as_tokens_are_left_alone() -> None:
    text = [
        {"input_ids": torch.ones(5).long(), "attention_mask": torch.ones(5).long(), "labels": y}
        for y in torch.eye(5)
    ]
    batch = to_buckets(default_collate)(text)
    assert batch["labels"].shape == (5, 5)
    assert batch["input_ids"].shape == (5, 8)


def test_choices_of_texts_are_padded_in_their_last_dimension() -> None:
    text = [{"input_ids": torch.ones(2, 5).long(), "attention_mask": torch.ones(2, 5).long()}] * 3
    batch = to_buckets(default_collate)(text)
    assert batch["input_ids"].shape == (3, 2, 8)
    assert batch["input_ids"][0, 0].tolist() == [1] * 5 + [7] * 3
    assert batch["attention_mask"].sum() == 3 * 2 * 5


def test_boxes_of_tokens_are_padded_with_them() -> None:
    text = [
        {"input_ids": torch.ones(5).long(), "attention_mask": torch.ones(5).long(), "bbox": box}
        for box in torch.ones(3, 5, 4).long()
    ]
    batch = to_buckets(default_collate)(text)
    assert batch["bbox"].shape == (3, 8, 4)
    assert batch["bbox"].sum() == 3 * 5 * 4


def test_a_batch_longer_than_all_lengths_is_rounded_up() -> None:
    collate = DataCollatorWithPadding(tokenizer())
    assert to_buckets(collate)(rows(20))["input_ids"].shape == (1, 64)
    assert to_buckets(collate, limits=(40,))(rows(20))["input_ids"].shape == (1, 40)


@pytest.mark.parametrize(("size", "width"), [(3, 4), (5, 6), (7, 8), (9, 11), (12, 16), (17, 64)])
def test_nothing_is_rounded_up_beyond_the_next_limit(size: int, width: int) -> None:
    """A limit below a batch is none: a tokenizer's, where the model reads more."""
    some = to_buckets(DataCollatorWithPadding(tokenizer()), limits=(6, 11))
    assert some(rows(size))["input_ids"].shape == (1, width)


def test_targets_are_not_rounded_up_beyond_the_next_limit() -> None:
    collate = DataCollatorForSeq2Seq(tokenizer())
    text = rows(3, 6, labels=lambda size: [1] * (size - 1))
    batch = to_buckets(collate, target_lengths=(3, 16, 16), limits=(7,))(text)
    assert batch["labels"].shape == (2, 7)


def test_a_column_that_is_as_wide_by_chance_is_left_alone() -> None:
    text = rows(5, 3, parts=lambda size: [1] * 5, token_type_ids=lambda size: [0] * size)
    batch = to_buckets(DataCollatorWithPadding(tokenizer()))(text)
    assert batch["parts"].shape == (2, 5)
    assert batch["token_type_ids"].shape == batch["input_ids"].shape == (2, 8)


def test_sounds_are_refused_where_they_would_be_padded() -> None:
    sounds = {"input_values": torch.randn(2, 5), "attention_mask": torch.ones(2, 5).long()}
    some = to_buckets(lambda features: sounds, input_name="input_values")
    with pytest.raises(BadInput, match="'input_values' are no tokens"):
        some([1, 2])


def test_a_batch_that_cannot_be_padded_is_refused() -> None:
    with pytest.raises(BadInput, match="no 'input_ids'"):
        to_buckets(default_collate)([{"x": 1.0}])
    with pytest.raises(BadInput, match="no attention_mask"):
        to_buckets(default_collate)([{"input_ids": torch.ones(3)}])
    whole = to_buckets(default_collate)([{"input_ids": torch.ones(4)}])
    assert whole["input_ids"].shape == (1, 4)


@pytest.mark.parametrize("labels", [lambda size: 1, lambda size: [1] * size])
def test_a_small_batch_is_filled_with_rows_that_count_nothing(labels: Any) -> None:
    text = rows(3, 6, labels=labels)
    padded = DataCollatorForTokenClassification(tokenizer())
    collate = DataCollatorWithPadding(tokenizer()) if labels(1) == 1 else padded
    small, full = to_buckets(collate)(text), to_buckets(collate, rows=5)(text)
    for name, value in small.items():
        torch.testing.assert_close(full[name][:2], value)
        assert len(full[name]) == 5
    assert (full["labels"][2:] == -100).all()
    assert (full["attention_mask"].sum(1) > 0).all()


def test_labels_that_no_loss_leaves_out_keep_a_batch_small() -> None:
    text = rows(3, 6, labels=lambda size: 0.5)
    batch = to_buckets(DataCollatorWithPadding(tokenizer()), rows=5)(text)
    assert batch["input_ids"].shape == (2, 8)


def test_rows_without_labels_are_added_only_where_their_outcome_is_cut_off() -> None:
    collate = DataCollatorWithPadding(tokenizer())
    assert len(to_buckets(collate, rows=5)(rows(3, 6))["input_ids"]) == 2
    filled = to_buckets(collate, rows=5, fills_unlabelled=True)(rows(3, 6))
    assert len(filled["input_ids"]) == 5


def test_things_that_are_not_by_row_keep_a_batch_small() -> None:
    def collate(features: list[Any]) -> Any:
        batch = DataCollatorWithPadding(tokenizer())(features)
        return {**batch, "patches": torch.ones(7, 3)}

    batch = to_buckets(collate, rows=5)(rows(3, 6, labels=lambda size: 1))
    assert len(batch["input_ids"]) == 2


def test_repeats_are_masked_and_the_batch_given_stays_as_it_is() -> None:
    some = to_buckets(default_collate, rows=3)
    batch = {"input_ids": torch.ones(3, 4), "labels": torch.tensor([1, 2, 0])}
    assert some.can_hide(batch)
    assert some.hide(batch, 1)["labels"].tolist() == [1, -100, -100]
    assert batch["labels"].tolist() == [1, 2, 0]
    assert not some.can_hide({"input_ids": torch.ones(3, 4), "labels": torch.ones(3)})


def test_it_travels_to_loading_workers() -> None:
    some = to_buckets(default_collate, rows=3)
    assert pickle.loads(pickle.dumps(some)) == some
