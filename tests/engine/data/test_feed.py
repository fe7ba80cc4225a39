from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from anytrain.engine.loop import Feed
from anytrain.engine.step.step import Batch


class Loader:
    """Batches 0, 1, 2, ... of an epoch, with a known last one."""

    def __init__(self, count: int, remainder: int = 0) -> None:
        self.count = count
        self.num_unrepeated = remainder
        self.end_of_dataloader = False
        self.epochs: list[int] = []
        self.closed = 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def walk_from(self, skip: int | None) -> Generator[Any]:
        try:
            for number in range(self.count):
                self.end_of_dataloader = number == self.count - 1
                yield number
        finally:
            self.closed += 1


def steps(feed: Feed, epoch: int = 0, first: int = 0) -> list[Batch]:
    return list(feed.steps(epoch, first))


@pytest.mark.parametrize(
    ("count", "micro", "expected"),
    [
        (4, 1, [(0,), (1,), (2,), (3,)]),
        (4, 2, [(0, 1), (2, 3)]),
        (5, 2, [(0, 1), (2, 3), (4,)]),
        (3, 8, [(0, 1, 2)]),
        (0, 2, []),
    ],
)
def test_batches_are_grouped_and_the_rest_of_an_epoch_makes_a_smaller_step(
    count: int, micro: int, expected: list[Any]
) -> None:
    found = steps(Feed(Loader(count), micro, lambda batches: None))
    assert [step.micro for step in found] == expected


def test_a_step_knows_its_items_and_the_number_of_its_first_batch() -> None:
    feed = Feed(Loader(5), 2, lambda batches: torch.tensor(sum(batches)))
    found = steps(feed, epoch=3, first=10)
    assert [int(step.num_items) for step in found if step.num_items is not None] == [1, 5, 4]
    assert [step.first for step in found] == [10, 12, 14]
    assert feed.loader.epochs == [3]  # type: ignore[attr-defined]  # it is the one above


def test_an_epoch_that_is_left_lets_go_of_its_loader() -> None:
    loader = Loader(5)
    walk = Feed(loader, 1, lambda batches: None).steps(0)
    next(walk)
    walk.close()
    assert loader.closed == 1


def test_repeats_are_cut_off_the_last_batch_alone() -> None:
    asked: list[tuple[Any, int]] = []

    def own(batch: Any, remainder: int) -> tuple[Any, bool]:
        asked.append((batch, remainder))
        return 100 + batch, True

    found = steps(Feed(Loader(3, remainder=7), 2, lambda batches: torch.tensor(sum(batches)), own))
    assert asked == [(2, 7)]
    assert [step.micro for step in found] == [(0, 1), (102,)]
    assert int(found[1].num_items) == 102  # type: ignore[arg-type]  # it was counted
    assert not found[1].is_last_spare


def test_a_last_batch_of_repeats_alone_is_run_and_weighs_nothing() -> None:
    counted: list[tuple[Any, ...]] = []

    def count(batches: tuple[Any, ...]) -> torch.Tensor:
        counted.append(batches)
        return torch.tensor(6)

    found = steps(Feed(Loader(4), 2, count, lambda batch, remainder: (batch, False)))
    assert counted == [(0, 1), (2,)]
    last = found[-1]
    assert last.micro == (2, 3)
    assert last.is_last_spare
    weighed = last.weighed(last.num_items)
    assert int(weighed[0][1]) == 6  # type: ignore[arg-type]  # it was counted
    assert float(weighed[1][1]) == float("inf")  # type: ignore[arg-type]  # it was counted
    assert [items for _, items in found[0].weighed(found[0].num_items)] == [torch.tensor(6)] * 2


def test_a_step_that_counts_nothing_weighs_nothing_by_items() -> None:
    found = steps(Feed(Loader(1), 1, lambda batches: None))
    assert found[0].weighed(None) == [(0, None)]
