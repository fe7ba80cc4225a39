"""A micro-batch is cut into parts that hold all of its rows, each once."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch

from anytrain.core.errors import NothingFits
from anytrain.engine.step.out_of_memory import SplitFactor, split_rows
from anytrain.engine.tree import num_rows


def test_the_first_tensor_tells_how_many_rows_there_are() -> None:
    assert num_rows({"n": 3, "scale": torch.tensor(2.0), "ids": torch.zeros(5, 2)}) == 5
    assert num_rows((np.zeros((4, 2)), torch.zeros(9))) == 4
    assert num_rows([[torch.zeros(2)]]) == 2
    assert num_rows({"text": ["a", "b"]}) is None


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8, 16])
def test_parts_hold_every_row_once_and_in_order(rows: int, parts: int) -> None:
    batch = {"ids": torch.arange(rows * 2).reshape(rows, 2), "text": [str(i) for i in range(rows)]}
    pieces = split_rows(batch, parts)
    assert len(pieces) <= min(parts, rows)
    assert torch.equal(torch.cat([piece["ids"] for piece in pieces]), batch["ids"])
    assert [text for piece in pieces for text in piece["text"]] == batch["text"]
    assert all(len(piece["text"]) == len(piece["ids"]) > 0 for piece in pieces)


def test_more_parts_than_rows_gives_a_part_a_row() -> None:
    assert [len(part) for part in split_rows(torch.arange(3), 8)] == [1, 1, 1]


def test_what_has_no_rows_stays_whole_in_every_part() -> None:
    table = torch.zeros(7, 2)
    batch = {"ids": torch.zeros(4, 2), "table": table, "temperature": torch.tensor(0.5), "n": 4}
    for piece in split_rows(batch, 2):
        assert piece["table"] is table
        assert piece["temperature"].ndim == 0
        assert piece["n"] == 4


def test_containers_keep_their_kind() -> None:
    from transformers import BatchEncoding

    class Mine(UserDict):  # type: ignore[type-arg]
        pass

    x = torch.zeros(2, 3)
    for batch in (Mine(ids=x), BatchEncoding({"ids": x}), (x, [x, x]), [x, x]):
        pieces = split_rows(batch, 2)
        assert [type(piece) for piece in pieces] == [type(batch)] * 2
        assert [num_rows(piece) for piece in pieces] == [1, 1]
    assert len(split_rows([x, x], 2)[0]) == 2  # two columns of two rows, not two rows


def test_a_list_with_a_thing_a_row_is_cut_like_a_column() -> None:
    images = [
        torch.zeros(3, 8, 8),
        torch.zeros(3, 9, 9),
        torch.zeros(3, 4, 4),
        torch.zeros(3, 2, 2),
    ]
    pieces = split_rows({"labels": torch.arange(4), "images": images}, 2)
    assert pieces[1]["images"][0] is images[2]
    assert [len(piece["images"]) for piece in pieces] == [2, 2]


def test_a_batch_without_rows_is_one_part() -> None:
    assert split_rows({"text": "a"}, 4) == [{"text": "a"}]
    assert len(split_rows(torch.zeros(0, 3), 4)) == 1


def test_parts_double_until_they_are_single_rows() -> None:
    parts = SplitFactor()
    assert [parts.more(6), parts.more(6), parts.more(6)] == [2, 4, 8]
    with pytest.raises(NothingFits, match="one row at a time"):
        parts.more(6)
    assert parts.number == 8


def test_a_single_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(NothingFits):
        SplitFactor().more(1)
    with pytest.raises(NothingFits, match="no rows that could be split"):
        SplitFactor().more(None)
