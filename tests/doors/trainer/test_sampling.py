"""The order of training is the one that train_sampling_strategy names."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn

from anytrain.core.errors import BadInput
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments

DRAW = random.Random(0)
LENGTHS = [DRAW.randint(1, 40) for _ in range(64)]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (input_ids.float().mean(1) * self.weight - labels).square().mean()}


class Pad:
    """Pad a batch, and keep which samples made it."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.seen.append([feature["labels"] for feature in features])
        rows = [torch.tensor(feature["input_ids"]) for feature in features]
        labels = torch.tensor([float(feature["labels"]) for feature in features])
        return {"input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True), "labels": labels}


def table(lengths: list[int] | None = None) -> datasets.Dataset:
    columns: dict[str, Any] = {
        "input_ids": [[1] * length for length in LENGTHS],
        "labels": list(range(64)),
    }
    if lengths is not None:
        columns["size"] = lengths
    return datasets.Dataset.from_dict(columns)


def batches(folder: Path, dataset: Any, **options: Any) -> list[list[int]]:
    pad = Pad()
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    Trainer(Sum(), args, train_dataset=dataset, data_collator=pad).train()
    return pad.seen


def test_sequential_training_walks_in_order(tmp_path: Path) -> None:
    seen = batches(tmp_path, table(), train_sampling_strategy="sequential")
    assert [i for batch in seen for i in batch] == list(range(64))


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_samples_of_like_length_are_trained_on_together(strategy: str, tmp_path: Path) -> None:
    def padding(seen: list[list[int]]) -> int:
        return sum(max(LENGTHS[i] for i in b) - LENGTHS[i] for b in seen for i in b)

    seen = batches(tmp_path / "a", table(), train_sampling_strategy=strategy)
    assert sorted(i for batch in seen for i in batch) == list(range(64))
    assert len(seen) == 16
    shuffled = batches(tmp_path / "b", table(), train_sampling_strategy="random")
    assert padding(seen) < padding(shuffled)


def test_the_column_of_lengths_counts_though_the_model_does_not_take_it(tmp_path: Path) -> None:
    sizes = list(range(64))
    seen = batches(
        tmp_path,
        table(sizes),
        train_sampling_strategy="group_by_length",
        length_column_name="size",
    )
    assert seen[0][0] == 63, "the longest comes first, and it is the one of size 63"


def test_lengths_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    rows = [{"x": i, "labels": i} for i in range(8)]
    with pytest.raises(BadInput, match="the lengths of the samples are not known"):
        batches(tmp_path, rows, train_sampling_strategy="group_by_length")
