"""A number of workers that was given is kept; where none was, the run may choose one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain import HfArgumentParser, Trainer, TrainingArguments


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x)[:, 0] - labels).square().mean()}


def chooses(args: TrainingArguments) -> bool:
    rows = [{"x": [0.0, 1.0], "labels": 1.0}] * 8
    trainer = Trainer(model=Small(), args=args, train_dataset=rows, eval_dataset=rows)
    evaluation: Any = trainer.get_eval_dataloader()
    assert evaluation.walk.workers is None
    loader: Any = trainer.get_train_dataloader()
    return loader.walk.workers is not None


@pytest.mark.parametrize(("given", "free"), [({}, True), ({"dataloader_num_workers": 0}, False)])
def test_a_number_that_was_given_is_kept(tmp_path: Path, given: dict[str, int], free: bool) -> None:
    assert chooses(TrainingArguments(str(tmp_path), use_cpu=True, **given)) is free


def test_a_number_that_is_assigned_later_is_given(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    args.dataloader_num_workers = 0
    assert not chooses(args)
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    args.set_dataloader(train_batch_size=4)
    assert not chooses(args)


def test_what_a_check_completes_or_a_copy_is_given_is_not_given_here(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    args.check()
    assert not args.is_told("optim")
    other = copy.copy(args)
    other.dataloader_num_workers = 0
    assert chooses(args)
    assert not chooses(other)


@pytest.mark.parametrize(("more", "free"), [([], True), (["--dataloader_num_workers=0"], False)])
def test_a_command_line_gives_what_it_holds_and_no_more(
    tmp_path: Path, more: list[str], free: bool
) -> None:
    words = ["--output_dir", str(tmp_path), "--use_cpu", "True", *more]
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--extra", action="append", default=[])
    args, _ = parser.parse_args_into_dataclasses([*words, "--extra=1"], look_for_args_file=False)
    assert args.is_told("use_cpu")
    assert not args.is_told("seed")
    assert chooses(args) is free
