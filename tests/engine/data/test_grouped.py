"""Samples of like length come together, in an order that seed and epoch alone decide."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader
from transformers.trainer_pt_utils import (
    BatchRebalanceSampler,
    DistributedLengthGroupedSampler,
    LengthGroupedSampler,
)

from anytrain import Accelerator
from anytrain.core.errors import BadInput
from anytrain.engine.data.grouped import GroupedByLength, Rebalanced, lengths_of
from anytrain.engine.data.shard import BatchSamplerShard

CASES = list(itertools.product((1, 7, 64, 1000), (1, 4, 8)))


def lengths(count: int) -> list[int]:
    draw = random.Random(count)
    return [draw.randint(3, 128) for _ in range(count)]


@pytest.mark.parametrize(("count", "batch_size"), CASES)
def test_the_order_is_that_of_transformers(count: int, batch_size: int) -> None:
    generator = torch.Generator().manual_seed(42)
    theirs = LengthGroupedSampler(batch_size, lengths=lengths(count), generator=generator)
    assert list(GroupedByLength(lengths(count), batch_size, seed=42)) == list(theirs)


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_has_the_order_that_transformers_deals_to_ranks(epoch: int) -> None:
    mine = GroupedByLength(lengths(96), 4, seed=9)
    mine.set_epoch(epoch)
    ranks = []
    for rank in range(2):
        theirs = DistributedLengthGroupedSampler(
            4, num_replicas=2, rank=rank, seed=9, lengths=lengths(96)
        )
        theirs.set_epoch(epoch)
        ranks.append(list(theirs))
    assert list(mine) == [i for pair in zip(*ranks, strict=True) for i in pair]


def test_an_epoch_can_be_walked_again() -> None:
    sampler = GroupedByLength(lengths(100), 4, seed=1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_every_sample_comes_once_and_the_longest_first() -> None:
    given = lengths(333)
    order = list(GroupedByLength(given, 8, seed=3))
    assert sorted(order) == list(range(333))
    assert given[order[0]] == max(given)
    assert len(GroupedByLength(given, 8)) == 333


def test_grouping_pads_less_than_shuffling() -> None:
    given = lengths(800)

    def padded(order: list[int]) -> int:
        batches = [order[i : i + 8] for i in range(0, len(order), 8)]
        return sum(max(given[i] for i in b) * len(b) - sum(given[i] for i in b) for b in batches)

    shuffled = torch.randperm(800, generator=torch.Generator().manual_seed(0)).tolist()
    assert padded(list(GroupedByLength(given, 8))) < padded(shuffled) / 10


def test_no_samples_make_no_order() -> None:
    assert list(GroupedByLength([], 4)) == []


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(BadInput, match="batch_size=0"):
        GroupedByLength([1], 0)


def text_dataset() -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {"input_ids": [[1, 2], [1], [1, 2, 3]], "size": [20, 10, 30], "text": ["a", "b", "c"]}
    )


def test_lengths_are_read_from_the_column() -> None:
    assert lengths_of(text_dataset(), "size") == [20, 10, 30]
    assert lengths_of(text_dataset().with_format("torch"), "size") == [20, 10, 30]


@pytest.mark.parametrize("kind", ["datasets", "torch", "list"])
def test_lengths_are_counted_where_there_is_no_column(kind: str) -> None:
    data: Any = text_dataset()
    data = {"datasets": data, "torch": data.with_format("torch"), "list": list(data)}[kind]
    assert lengths_of(data) == [2, 1, 3]
    assert lengths_of(data, "length", "text") == [1, 1, 1]


@pytest.mark.parametrize("data", [text_dataset(), [{"x": [1]}], [(1, 2)], [torch.ones(3)]])
def test_unknown_lengths_are_refused(data: Any) -> None:
    with pytest.raises(BadInput, match="length_column_name"):
        lengths_of(data, "length", "input_values")


def steps_of(sampler: Rebalanced) -> list[list[list[int]]]:
    batches = list(sampler)
    assert len(batches) == len(sampler)
    return [batches[i : i + sampler.parts] for i in range(0, len(batches), sampler.parts)]


def cost(given: list[int], batch: list[int]) -> float:
    longest = max(given[i] for i in batch)
    return len(batch) * (longest + 0.001 * longest**2)


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 4), (2, 2), (4, 1), (3, 2)])
def test_micro_batches_hold_their_step_and_cost_no_more_than_those_of_transformers(
    ranks: int, accumulation: int
) -> None:
    given = lengths(96)
    size = 8 * ranks * accumulation
    mine = Rebalanced(
        given, size, num_ranks=ranks, accumulation=accumulation, drop_last=True, seed=42
    )
    theirs = [
        list(BatchRebalanceSampler(given, size, ranks, accumulation, rank=rank))
        for rank in range(ranks)
    ]
    for number, step in enumerate(steps_of(mine)):
        first = number * accumulation
        others = [batch for rank in theirs for batch in rank[first : first + accumulation]]
        assert sorted(i for b in step for i in b) == sorted(i for b in others for i in b)
        assert all(step)
        dearest = max(cost(given, batch) for batch in others)
        assert max(cost(given, batch) for batch in step) <= dearest * (1 + 1e-9)
        costs = [cost(given, batch) for batch in step]
        assert costs == sorted(costs, reverse=True)


def test_the_last_step_is_kept_or_dropped() -> None:
    given = lengths(21)
    kept = steps_of(Rebalanced(given, 8, num_ranks=2, accumulation=2))
    assert [sum(map(len, step)) for step in kept] == [8, 8, 5]
    assert sorted(i for step in kept for b in step for i in b) == list(range(21))
    dropped = Rebalanced(given, 8, num_ranks=2, accumulation=2, drop_last=True)
    assert steps_of(dropped) == kept[:2]


def test_a_last_step_with_too_few_samples_repeats_some() -> None:
    last = steps_of(Rebalanced(lengths(9), 8, num_ranks=4))[-1]
    assert [len(batch) for batch in last] == [1, 1, 1, 1]


def test_ranks_are_dealt_the_micro_batches_in_turn() -> None:
    order = Rebalanced(lengths(64), 16, num_ranks=2, accumulation=2)
    dealt = [list(BatchSamplerShard(order, 2, rank)) for rank in range(2)]
    assert [b for pair in zip(*dealt, strict=True) for b in pair] == list(order)


def test_a_rebalanced_epoch_can_be_walked_again() -> None:
    order = Rebalanced(lengths(64), 16, num_ranks=2)
    first = list(order)
    order.set_epoch(1)
    assert list(order) != first
    order.set_epoch(0)
    assert list(order) == first
    assert isinstance(order, BatchSampler)


def test_a_step_smaller_than_its_micro_batches_is_refused() -> None:
    with pytest.raises(BadInput, match="in 8 micro-batches"):
        Rebalanced(lengths(20), 4, num_ranks=4, accumulation=2)


def test_a_length_of_zero_costs_nothing_and_is_dealt() -> None:
    batches = list(Rebalanced([0, 0, 5, 0], 4, num_ranks=2))
    assert sorted(map(sorted, batches)) == [[0, 1, 3], [2]]


def loaded(kind: str) -> Any:
    data = [{"input_ids": torch.tensor([i] * n), "x": i} for i, n in enumerate(lengths(46))]
    accelerator = Accelerator(cpu=True)
    if kind == "grouped":
        sampler = GroupedByLength(lengths_of(data), 4, seed=7)
        loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=numbers)
    else:
        order = Rebalanced(lengths_of(data), 8, num_ranks=2, seed=7)
        loader = DataLoader(data, batch_sampler=order, collate_fn=numbers)
    return accelerator.prepare(loader)


def numbers(features: list[Any]) -> torch.Tensor:
    return torch.tensor([feature["x"] for feature in features])


@pytest.mark.parametrize("stop", [1, 5, 12, 17])
@pytest.mark.parametrize("kind", ["grouped", "rebalanced"])
def test_a_resumed_loader_deals_the_rest_of_the_order(kind: str, stop: int) -> None:
    def walk(loader: Any) -> Iterator[list[int]]:
        while loader.iteration < 2:
            for batch in loader:
                yield batch.tolist()

    whole = list(walk(loaded(kind)))
    assert len(whole) == 24
    assert sorted(i for batch in whole[:12] for i in batch) == list(range(46))
    loader = loaded(kind)
    going = walk(loader)
    before = [next(going) for _ in range(stop)]
    place = loader.state_dict()
    torch.rand(100)  # the order is nobody's randomness
    fresh = loaded(kind)
    fresh.load_state_dict(place)
    assert before + list(walk(fresh)) == whole
