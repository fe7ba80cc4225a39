from __future__ import annotations

import torch

from anytrain.engine.data.padding import WithoutFullMask, are_even
from anytrain.engine.data.seeded import draws_nothing

ROWS = [{"input_ids": [1, 2, 3], "labels": 0}, {"input_ids": [4, 5, 6], "labels": 1}]


def collate(rows):
    mask = torch.tensor([[i > 0 for i in row["input_ids"]] for row in rows])
    return {"input_ids": torch.tensor([r["input_ids"] for r in rows]), "attention_mask": mask}


def test_a_mask_that_hides_nothing_is_left_out():
    assert list(WithoutFullMask(collate)(ROWS)) == ["input_ids"]


def test_a_mask_that_hides_something_stays():
    rows = [*ROWS, {"input_ids": [7, 8, 0], "labels": 0}]
    assert "attention_mask" in WithoutFullMask(collate)(rows)


def test_only_samples_of_one_length_are_even():
    assert are_even(ROWS)
    assert not are_even([*ROWS, {"input_ids": [1]}])
    assert not are_even([])
    assert not are_even(range(3))  # nothing is known of these


def test_it_draws_what_its_collator_draws():
    assert draws_nothing([1], WithoutFullMask(torch.utils.data.default_collate))
    assert draws_nothing([1], WithoutFullMask(collate))
    assert not draws_nothing([1], WithoutFullMask(lambda rows: torch.rand(1)))
