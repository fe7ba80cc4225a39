"""Batches are those of transformers' default collator, and what does not fit is named."""

from __future__ import annotations

import timeit
import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from transformers import default_data_collator

from anytrain.core.errors import BadInput
from anytrain.engine.data.collate import collate

ALIKE: dict[str, list[Any]] = {
    "integers": [{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}],
    "floats": [{"x": [0.1, 2], "label": 0.5}, {"x": [3.0, 4], "label": 1}],
    "mixed": [{"x": [1, 2], "y": True}, {"x": [3.5, 4], "y": False}],
    "scalars": [{"x": 1, "y": 0.1, "z": True}, {"x": 2, "y": 0.2, "z": False}],
    "nested": [{"x": [[1, 2], [3, 4]]}, {"x": [[5, 6], [7, 8]]}],
    "tuples": [{"x": (1, 2)}, {"x": (3, 4)}],
    "arrays": [{"x": np.ones((2, 3), np.float32)}, {"x": np.zeros((2, 3), np.float32)}],
    "doubles": [{"x": np.array(1.5)}, {"x": np.array(2.5)}],
    "numpy scalars": [{"x": np.float64(0.1), "label": np.int32(1)}] * 2,
    "lists of arrays": [{"x": [np.ones(2), np.zeros(2)]}] * 2,
    "tensors": [{"x": torch.ones(2, dtype=torch.int32), "label": torch.tensor(1)}] * 2,
    "float labels in tensors": [{"label": torch.tensor(1.5)}, {"label": torch.tensor(2.5)}],
    "booleans as labels": [{"label": True}, {"label": False}],
    "labels in lists": [{"label": [0, 1, 1]}, {"label": [1, 0, 0]}],
    "label_ids": [{"label_ids": [1, 2]}, {"label_ids": [3, -100]}],
    "float label_ids": [{"label_ids": [1.0, 2.0]}, {"label_ids": [3.0, 4]}],
    "nested label_ids": [{"label_ids": [[1, 0]]}, {"label_ids": [[0, 1]]}],
    "label_ids in tensors": [{"label_ids": torch.ones(2, dtype=torch.int8)}] * 2,
    "both labels": [{"label": 1, "label_ids": [2]}] * 2,
    "texts and nothing": [{"x": 1, "text": "a", "y": None, "label": None}] * 2,
    "other names of labels": [{"labels": [1, 2], "start_positions": 3}] * 2,
    "empty lists": [{"x": []}, {"x": []}],
    "objects": [SimpleNamespace(x=[1, 2], label=1), SimpleNamespace(x=[3, 4], label=0)],
    "mappings": [UserDict(x=[1], label=1), UserDict(x=[2], label=0)],
    "big integers": [{"x": 2**62}, {"x": -(2**62)}],
}


@pytest.mark.parametrize("features", ALIKE.values(), ids=ALIKE.keys())
def test_a_batch_is_that_of_transformers(features: list[Any]) -> None:
    mine = collate(features)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch finds lists of arrays slow
        theirs = default_data_collator(features)
    assert list(mine) == list(theirs)
    for key, value in theirs.items():
        assert mine[key].dtype == value.dtype, key
        assert torch.equal(mine[key], value), key


def test_label_ids_in_arrays_are_stacked() -> None:
    features = [{"label_ids": np.array([1, 2])}, {"label_ids": np.array([3, 4])}]
    assert collate(features)["labels"].tolist() == [[1, 2], [3, 4]]
    assert collate(features)["labels"].dtype == torch.long


def test_a_label_in_an_array_keeps_its_kind() -> None:
    assert collate([{"label": np.array(1)}] * 2)["labels"].dtype == torch.long
    assert collate([{"label": np.array([0, 1])}] * 2)["labels"].dtype == torch.float


def test_a_label_that_is_a_vector_is_stacked() -> None:
    features = [{"label": torch.tensor([0.0, 1.0])}, {"label": torch.tensor([1.0, 0.0])}]
    assert collate(features)["labels"].tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_fields_of_a_dataclass_with_slots_are_found() -> None:
    @dataclass(slots=True)
    class Sample:
        x: list[int]
        label: int

    batch = collate([Sample([1], 0), Sample([2], 1)])
    assert batch["x"].tolist() == [[1], [2]]
    assert batch["labels"].tolist() == [0, 1]


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "features",
    [
        [(torch.ones(2), 1), (torch.zeros(2), 0)],
        [[1, 2.0], [3, 4.0]],
        [torch.ones(2), torch.zeros(2)],
        [np.ones(2), np.zeros(2)],
        [1, 2],
        [Pair(1, 2.0), Pair(3, 4.0)],
    ],
)
def test_what_is_no_dict_is_stacked_as_torch_does(features: list[Any]) -> None:
    mine, torchs = collate(features), default_collate(features)
    assert type(mine) is type(torchs)
    torch.testing.assert_close(mine, torchs)


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 3], [1]],
        [np.ones(3), np.ones(1)],
        [torch.ones(3), torch.ones(1)],
        [(1, 2, 3), (1,)],
    ],
)
def test_rows_of_different_lengths_are_named_with_the_fix(rows: list[Any]) -> None:
    with pytest.raises(BadInput, match=r"'input_ids': its rows have different lengths \(3, 1\)"):
        collate([{"input_ids": row, "label": 0} for row in rows])
    with pytest.raises(BadInput, match="DataCollatorWithPadding"):
        collate([{"input_ids": row} for row in rows])


def test_arrays_of_different_shapes_are_named() -> None:
    with pytest.raises(BadInput, match=r"\(2, 3\), \(2, 4\)"):
        collate([{"image": torch.ones(2, 3)}, {"image": torch.ones(2, 4)}])


def test_label_ids_of_different_lengths_are_named() -> None:
    with pytest.raises(BadInput, match="'label_ids': its rows"):
        collate([{"label_ids": [1, 2]}, {"label_ids": [1]}])


@pytest.mark.parametrize(
    "features",
    [
        [{"x": {"a": 1}}, {"x": {"a": 2}}],
        [{"x": 1}, {"x": None}],
        [{"label": "yes"}, {"label": "no"}],
    ],
)
def test_what_makes_no_tensor_is_named(features: list[Any]) -> None:
    with pytest.raises(BadInput, match=f"Cannot collate '{next(iter(features[0]))}'"):
        collate(features)


@pytest.mark.parametrize("odd", ["yes", None])
def test_a_text_or_nothing_among_numbers_is_named(odd: Any) -> None:
    with pytest.raises(BadInput, match=f"'labels': number 2 of the .* has {odd!r} there") as caught:
        collate([{"labels": 1}, {"labels": odd}])
    assert "the first sample has a value of type int" in str(caught.value)


def test_a_sample_that_lacks_a_key_is_named() -> None:
    with pytest.raises(BadInput, match="'y': number 2 of the batch's samples does not have"):
        collate([{"x": 1, "y": 2}, {"x": 1}])


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("sample", [{"x": 1}, (1, 2), torch.ones(2), SimpleNamespace(x=1)])
def test_a_sample_that_is_none_is_named(sample: Any, place: int) -> None:
    rows = [sample, sample]
    rows[place] = None
    with pytest.raises(BadInput, match=f"number {place + 1} of the batch's 2 samples is"):
        collate(rows)


def test_a_sample_of_another_kind_is_named() -> None:
    with pytest.raises(BadInput, match="'x': number 2 of the batch's samples is no dict but"):
        collate([{"x": 1}, 3])


def test_no_samples_make_no_batch() -> None:
    with pytest.raises(BadInput, match="no samples"):
        collate([])


def test_a_batch_of_texts_is_made_as_fast_as_by_transformers() -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    rows = [{name: list(range(128)) for name in names} | {"label": 1} for _ in range(32)]
    mine = min(timeit.repeat(lambda: collate(rows), number=3, repeat=7))
    theirs = min(timeit.repeat(lambda: default_data_collator(rows), number=3, repeat=7))
    assert mine < theirs  # 0.3 ms and 1.4 ms on one core
