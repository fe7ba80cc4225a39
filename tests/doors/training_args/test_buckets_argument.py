"""How lengths to pad to are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anytrain.core.errors import BadInput, BadType
from anytrain.doors.training_args import HfArgumentParser, TrainingArguments


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None),
        ("none", None),
        ("auto", "auto"),
        ("Auto", "auto"),
        (6, 6),
        ("6", 6),
        ("64,128", [64, 128]),
        ("[64, 128]", [64, 128]),
        ("[64]", [64]),
        ((64, 128), [64, 128]),
    ],
)
def test_lengths_are_auto_a_number_or_a_list(given: Any, wanted: Any, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), length_buckets=given)
    assert args.length_buckets == wanted
    args.check()
    assert args.length_buckets == wanted


def test_a_command_line_can_ask_for_them(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--length_buckets", "64,128"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert args.length_buckets == [64, 128]


@pytest.mark.parametrize("given", [0, -1, [], [0, 8], "0"])
def test_no_length_is_below_one(given: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="length_buckets"):
        TrainingArguments(str(tmp_path), length_buckets=given)


@pytest.mark.parametrize("given", ["some", [1.5], True, "64,x"])
def test_what_is_no_number_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(BadType, match="length_buckets"):
        TrainingArguments(str(tmp_path), length_buckets=given)


@pytest.mark.parametrize("order", ["group_by_length", "batch_rebalance", "sequential"])
def test_another_order_contradicts_them(order: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="in which order samples come"):
        TrainingArguments(str(tmp_path), length_buckets=4, train_sampling_strategy=order)
