"""What a model does not take is left out, and said once."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from torch import nn
from transformers.utils.generic import can_return_loss as their_can_return_loss, find_labels

from anytrain.core.errors import BadInput
from anytrain.engine.data.collate import collate
from anytrain.engine.data.columns import (
    DropColumns,
    can_return_loss,
    drop_dataset_columns,
    forward_names,
    kept_columns,
    label_names,
)

LOGGER = "anytrain.engine.data.columns"


class Plain(nn.Module):
    def forward(self, x: Any, y_label: Any = None) -> Any:
        return x


class Anything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args


class Contrast(nn.Module):
    def forward(self, x: Any, return_loss: bool = True) -> Any:
        return x


def bert(kind: Any = transformers.BertForSequenceClassification) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    return kind(config)


def adapted() -> nn.Module:
    return peft.get_peft_model(bert(), peft.LoraConfig(task_type="SEQ_CLS", r=2))


def mixed() -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["query"])
    return peft.PeftMixedModel(bert(), config)


@pytest.mark.parametrize("make", [adapted, mixed])
def test_an_adapted_model_takes_what_the_one_below_takes(make: Any) -> None:
    model = make()
    assert forward_names(model) == forward_names(bert())
    assert {"input_ids", "attention_mask", "labels"} <= set(forward_names(model))
    assert label_names(model) == ["labels"]


def test_forward_names_are_those_of_the_signature() -> None:
    assert forward_names(Plain()) == ["x", "y_label"]


@pytest.mark.parametrize(
    "kind",
    [
        transformers.BertForSequenceClassification,
        transformers.BertForQuestionAnswering,
        transformers.BertForPreTraining,
        transformers.BertModel,
    ],
)
def test_labels_are_found_as_transformers_finds_them(kind: Any) -> None:
    assert label_names(bert(kind)) == find_labels(kind)
    assert can_return_loss(bert(kind)) == their_can_return_loss(kind)


def test_labels_of_a_plain_module_are_those_named_so() -> None:
    assert label_names(Plain()) == ["y_label"]
    assert label_names(Anything()) == []


def test_a_model_that_makes_its_own_loss_is_known() -> None:
    assert can_return_loss(Contrast())
    assert not can_return_loss(Plain())


def test_kept_columns_are_inputs_and_labels_under_any_name() -> None:
    assert kept_columns(Plain(), ["target"]) == ["x", "y_label", "label", "label_ids", "target"]


def test_a_forward_that_names_nothing_takes_everything() -> None:
    assert kept_columns(Anything(), []) is None


def test_what_is_not_kept_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    keep = kept_columns(Plain(), [])
    assert keep is not None
    drop = DropColumns(collate, keep, model_name="Plain", description="training")
    features = [{"x": 1, "label": 0, "idx": 7, "text": "a"}] * 2
    with caplog.at_level(logging.INFO, LOGGER):
        batches = [drop(features) for _ in range(3)]
    assert all(list(batch) == ["labels", "x"] for batch in batches)
    assert caplog.messages == [
        "Columns of the training set that Plain.forward does not take are left out: idx, text."
    ]


def test_nothing_is_said_where_everything_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        DropColumns(collate, ["x"])([{"x": 1}])
    assert not caplog.messages


def test_samples_that_are_no_dicts_pass_whole() -> None:
    batch = DropColumns(collate, ["x"])([(1, 2), (3, 4)])
    assert [part.tolist() for part in batch] == [[1, 3], [2, 4]]


def test_other_mappings_become_dicts() -> None:
    encoding = transformers.BatchEncoding({"x": [1, 2], "offset": [0, 0]})
    assert list(DropColumns(collate, ["x"])([encoding, encoding])) == ["x"]


def test_it_can_be_sent_to_a_worker() -> None:
    drop = pickle.loads(pickle.dumps(DropColumns(collate, ["x"])))
    loader = torch.utils.data.DataLoader(
        [{"x": i, "y": i} for i in range(4)], batch_size=2, collate_fn=drop, num_workers=1
    )
    assert [batch["x"].tolist() for batch in loader] == [[0, 1], [2, 3]]


def table() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": [1, 2], "label": [0, 1], "idx": [5, 6]})


def test_columns_of_a_dataset_are_removed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        left = drop_dataset_columns(table(), ["x", "label"], description="evaluation")
    assert left.column_names == ["x", "label"]
    assert "evaluation set" in caplog.text
    assert "idx" in caplog.text


def test_a_dataset_that_fits_is_the_same_object() -> None:
    data = table()
    assert drop_dataset_columns(data, ["x", "label", "idx"]) is data


def test_a_dataset_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(BadInput, match="remove_unused_columns=False"):
        drop_dataset_columns(table(), ["input_ids"], model_name="Bert")


def test_samples_of_which_nothing_is_left_are_refused() -> None:
    with pytest.raises(BadInput, match="it has sentence, idx, and forward takes input_ids"):
        DropColumns(collate, ["input_ids"])([{"sentence": "a", "idx": 1}])
