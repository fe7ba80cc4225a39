"""A few lengths that pad least, and batches that keep to them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from anytrain.core.errors import BadInput
from anytrain.engine.data.buckets import Bucketed, choose, padding_share
from anytrain.engine.data.shard import BatchSamplerShard, SkipBatchSampler


def lengths(count: int, longest: int = 100) -> list[int]:
    draw = random.Random(count)
    return [min(longest, 1 + int(draw.gammavariate(3, 10))) for _ in range(count)]


def tokens(given: list[int], buckets: tuple[int, ...]) -> int:
    return sum(min(b for b in buckets if b >= length) for length in given)


@pytest.mark.parametrize(("most", "multiple"), [(1, 8), (2, 8), (3, 8), (4, 4), (8, 16)])
def test_no_other_choice_of_lengths_pads_less(most: int, multiple: int) -> None:
    given = lengths(200, 64)
    found = choose(given, most, multiple)
    top = -(-max(given) // multiple) * multiple
    below = range(multiple, top, multiple)
    others = [
        (*some, top)
        for count in range(min(most, len(below) + 1))
        for some in itertools.combinations(below, count)
    ]
    assert tokens(given, found) == min(tokens(given, other) for other in others)
    assert len(found) <= most
    assert all(length % multiple == 0 for length in found)


def test_a_shape_that_saves_less_than_it_costs_is_not_taken() -> None:
    given = lengths(500)
    counts = [len(choose(given, 8, cost_per_shape=cost)) for cost in (0, 100, 1000, 10_000, 1e9)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 8
    assert counts[-1] == 1


def test_no_length_is_rounded_up_beyond_what_the_model_reads() -> None:
    assert choose([3, 49, 50], 2, limit=50) == (8, 50)
    assert choose([3, 49, 61], 2, limit=50)[-1] == 61  # the sample is there, and is not cut


def test_no_samples_are_refused() -> None:
    with pytest.raises(BadInput, match="Cannot choose lengths"):
        choose([])


def test_a_million_samples_of_eight_thousand_tokens_take_little_time() -> None:
    given = np.random.default_rng(0).integers(1, 8193, 1_000_000)
    assert choose(given)[-1] == 8192


def made(count: int, size: int, step: int = 1, **more: Any) -> tuple[Bucketed, tuple[int, ...]]:
    given = lengths(count)
    buckets = choose(given, 6)
    return Bucketed(given, buckets, size, batches_per_step=step, **more), buckets


CASES = list(itertools.product((1, 5, 64, 333, 1000), (1, 4, 32), (1, 3, 4)))


@pytest.mark.parametrize(("count", "size", "step"), CASES)
def test_an_epoch_has_each_sample_once_in_full_batches(count: int, size: int, step: int) -> None:
    sampler, _ = made(count, size, step)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(count))
    assert all(len(batch) == size for batch in batches[:-1])
    assert len(batches) == len(sampler)


@pytest.mark.parametrize(("size", "step"), [(4, 1), (8, 4), (16, 2)])
def test_the_batches_of_a_step_have_one_length(size: int, step: int) -> None:
    sampler, buckets = made(1000, size, step)
    padded = sampler.padded()
    whole = len(padded) // (size * step) * size * step
    by_step = padded[:whole].reshape(-1, size * step)
    assert (by_step == by_step[:, :1]).all()
    assert set(padded) <= set(buckets)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    first, again = (made(300, 8, seed=3)[0] for _ in range(2))
    other, _ = made(300, 8, seed=4)
    assert list(first) == list(first) == list(again)
    assert list(first) != list(other)
    again.set_epoch(1)
    assert list(first) != list(again)
    again.set_epoch(0)
    assert list(first) == list(again)


def test_who_shares_a_batch_and_when_it_comes_changes_by_epoch() -> None:
    sampler, _ = made(400, 8)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([frozenset(batch) for batch in sampler])
    assert len(set(epochs[0]) & set(epochs[1])) <= 2
    sampler.set_epoch(0)
    inner = sampler.padded()[8:-8].tolist()
    assert inner not in (sorted(inner), sorted(inner, reverse=True))


def test_one_of_the_longest_batches_comes_first() -> None:
    sampler, buckets = made(400, 8)
    assert sampler.padded()[0] == buckets[-1]


def test_little_more_is_padded_than_the_buckets_ask_for() -> None:
    given = lengths(4000)
    buckets = choose(given, 6)
    least = padding_share(given, np.array(buckets)[np.searchsorted(buckets, given)])
    sampler = Bucketed(given, buckets, 16)
    assert 1 - sum(given) / sampler.padded().sum() < least + 0.01


def test_a_last_batch_that_is_not_full_can_be_left_out() -> None:
    sampler, _ = made(101, 8, drop_last=True)
    assert [len(batch) for batch in sampler] == [8] * 12
    assert len(sampler) == 12


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_get_batches_of_one_length_at_each_step(ranks: int) -> None:
    accumulation = 2
    sampler, _ = made(1000, 4, ranks * accumulation)
    shares = [list(BatchSamplerShard(sampler, ranks, rank)) for rank in range(ranks)]
    given, buckets = lengths(1000), np.array(sampler.layout["buckets"])
    full = 1000 // (4 * ranks * accumulation)
    for step in range(full):
        micro = [share[step * 2 : step * 2 + 2] for share in shares]
        longest = [max(given[i] for i in batch) for own in micro for batch in own]
        assert len(set(np.searchsorted(buckets, longest))) == 1


@pytest.mark.parametrize("done", [0, 1, 7, 40])
def test_an_epoch_goes_on_in_the_order_it_began_with(done: int) -> None:
    begun, _ = made(333, 4, 2)
    begun.set_epoch(5)
    seen = [i for batch in list(begun)[:done] for i in batch]
    # Another number of ranks, and lengths that are chosen otherwise.
    resumed = Bucketed(lengths(333), (32, 104), 4, batches_per_step=6)
    resumed.keep_layout(begun.order_layout(), 5)
    resumed.set_epoch(5)
    left = [i for batch in SkipBatchSampler(resumed, done) for i in batch]
    assert sorted(seen + left) == list(range(333))
    resumed.set_epoch(6)
    assert resumed.order_layout() == resumed.layout


@pytest.mark.parametrize("size", [2, 8, 12])
def test_batches_of_another_size_keep_an_epochs_order(size: int) -> None:
    begun, _ = made(333, 4, 2)
    begun.set_epoch(5)
    resumed, _ = made(333, size, 3)
    resumed.keep_layout(begun.order_layout(), 5)
    resumed.set_epoch(5)
    orders = [[i for batch in each for i in batch] for each in (begun, resumed)]
    assert orders[0] == orders[1]


def test_a_sample_longer_than_all_buckets_is_dealt_with_the_longest() -> None:
    sampler = Bucketed([3, 9, 50, 70], (8, 16), 2)
    assert sorted(i for batch in sampler for i in batch) == [0, 1, 2, 3]
