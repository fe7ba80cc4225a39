from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

from anytrain import Accelerator
from anytrain.engine.data.collate import collate
from anytrain.engine.data.columns import DropColumns, Table
from anytrain.engine.data.seeded import SeededBatchSampler, draws_nothing, load

ROWS = [{"x": torch.randn(3), "labels": torch.tensor(0)} for _ in range(6)]


class Own(Dataset[Any]):
    """A user's data set: it may do anything."""

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3)

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS,
        tuple(ROWS),
        range(6),
        np.arange(6),
        torch.arange(6),
        TensorDataset(torch.arange(6)),
        Subset(TensorDataset(torch.arange(6)), [1, 2]),
        ConcatDataset([TensorDataset(torch.arange(6))] * 2),
        Table({"x": [1, 2], "labels": torch.tensor([0, 1])}),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
@pytest.mark.parametrize("collator", [default_collate, collate, DropColumns(collate, ["x"])])
def test_plain_data_is_known_to_draw_nothing(dataset: Any, collator: Any) -> None:
    assert draws_nothing(dataset, collator)


@pytest.mark.parametrize(
    ("dataset", "collator"),
    [
        (Own(), default_collate),
        (Subset(Own(), [1]), default_collate),
        (ConcatDataset([ROWS, Own()]), default_collate),
        (Table({"x": Own()}), default_collate),
        (ROWS, lambda rows: rows[0].crop()),
        (ROWS, DropColumns(lambda rows: rows[0].crop(), ["x"])),
    ],
)
def test_what_nobody_knows_may_draw(dataset: Any, collator: Any) -> None:
    assert not draws_nothing(dataset, collator)


def test_who_says_so_is_believed() -> None:
    dataset = Own()
    dataset.draws_nothing = True  # type: ignore[attr-defined]  # a word to the loader
    assert draws_nothing(dataset, collate)


def test_collators_of_transformers_that_pad_draw_nothing_and_those_that_mask_do() -> None:
    transformers = pytest.importorskip("transformers")
    assert draws_nothing(ROWS, transformers.default_data_collator)
    assert draws_nothing(ROWS, transformers.DataCollatorWithPadding(tokenizer=None))
    masking = transformers.DataCollatorForLanguageModeling
    assert not draws_nothing(ROWS, masking.__new__(masking))


def test_a_dataset_with_a_transform_may_draw() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    assert draws_nothing(rows, collate)
    assert draws_nothing(rows.with_format("torch"), collate)
    assert not draws_nothing(rows.with_transform(lambda row: row), collate)


def test_batches_are_remembered_and_loaded_again_without_seeds() -> None:
    tickets = SeededBatchSampler([[3, 1], [0, 2]], seeds=False)
    tickets.begin(seed=7, epoch=0)
    assert list(tickets) == [[3, 1], [0, 2]]
    assert tickets.dealt(1) == [0, 2]
    again = load(ROWS, collate, tickets.draw([0, 2]))
    assert torch.equal(again["x"], torch.stack([ROWS[0]["x"], ROWS[2]["x"]]))


def test_the_sample_that_cannot_be_loaded_is_named() -> None:
    class Broken(Own):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise ValueError("no such picture")
            return super().__getitem__(index)

    loader = Accelerator(cpu=True).prepare(DataLoader(Broken(), batch_size=2))
    with pytest.raises(ValueError, match="no such picture") as raised:
        list(loader)
    assert str(raised.value) == "no such picture\nRaised by the data set, for sample 3."


class RunsDry:
    """A data set that reads from an iterator, which ends before the data set does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise StopIteration
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_runs_dry_is_no_end_of_the_data(workers: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(RunsDry(), batch_size=2, num_workers=workers))
    with pytest.raises(RuntimeError, match=r"StopIteration for sample 5"):
        list(loader)
