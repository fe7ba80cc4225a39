from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from anytrain.engine.data.seeded import function_draws_nothing


class Points(Dataset):
    def __init__(self) -> None:
        self.x, self.y = torch.randn(8, 2), [0, 1] * 4
        self.length = 8

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.scaled(index), "labels": torch.tensor(self.y[index])}

    def scaled(self, index: int) -> torch.Tensor:
        return self.x[index].float() / max(1, len(self.y))


class Noisy(Points):
    def scaled(self, index: int) -> torch.Tensor:
        return self.x[index] + torch.randn(2)


class Transformed(Points):
    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.x[index])


class Nested(Points):
    def __init__(self) -> None:
        super().__init__()
        self.x = Noisy()


def stack(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def cropped(rows: list[Any]) -> Any:
    begin = random.randint(0, 1)
    return torch.stack([row["x"][begin:] for row in rows])


def shuffled(rows: list[Any]) -> Any:
    return np.random.permutation(rows)


def late(rows: list[Any]) -> Any:
    import random as dice

    return dice.random()


def outer(rows: list[Any]) -> Any:
    return cropped(rows)


def test_code_that_only_picks_and_stacks_draws_nothing():
    points = Points()
    assert function_draws_nothing(points.__getitem__, points)
    assert function_draws_nothing(stack)


@pytest.mark.parametrize("function", [cropped, shuffled, late, outer, lambda rows: rows[0].noise()])
def test_a_collator_that_may_draw_is_not_believed(function):
    assert not function_draws_nothing(function)


@pytest.mark.parametrize(
    "dataset", [Noisy(), Transformed(lambda x: x + torch.rand(1)), Transformed(object()), Nested()]
)
def test_a_dataset_that_may_draw_is_not_believed(dataset):
    assert not function_draws_nothing(dataset.__getitem__, dataset)
