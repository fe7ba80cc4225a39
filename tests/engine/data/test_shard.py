"""Every sample has an owner, every rank the same number of batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from anytrain.core.errors import BadInput
from anytrain.engine.data.shard import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler

SIZES = (0, 1, 3, 8, 21, 24)
CASES = list(itertools.product(SIZES, (1, 2, 3, 4), (False, True), (False, True)))


def order(size: int, drop_last: bool = False, batch_size: int = 4) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(size)), batch_size, drop_last)


@pytest.mark.parametrize(("size", "ranks", "split", "drop_last"), CASES)
def test_shards_are_even_and_cover_everything(
    size: int, ranks: int, split: bool, drop_last: bool
) -> None:
    batch_size = 12 if split else 4
    shards = [
        BatchSamplerShard(order(size, drop_last, batch_size), ranks, r, split) for r in range(ranks)
    ]
    dealt = [list(shard) for shard in shards]
    assert len({len(batches) for batches in dealt}) == 1, "every rank has as many batches"
    assert [len(batches) for batches in dealt] == [len(shard) for shard in shards]
    each = batch_size // ranks if split else batch_size
    assert all(len(batch) == each for batches in dealt for batch in batches)
    # Rank by rank, round by round, the samples come in their order.
    flat = [i for turn in zip(*dealt, strict=True) for batch in turn for i in batch]
    if drop_last:
        assert flat == list(range(len(flat)))
    else:
        assert flat[:size] == list(range(size))
        assert set(flat) == set(range(size))
        total = each * ranks
        assert all(shard.remainder in ((size % total) if size else None,) for shard in shards)


@pytest.mark.parametrize(("size", "ranks"), list(itertools.product(SIZES, (1, 2, 3))))
def test_uneven_shards_hold_each_sample_once(size: int, ranks: int) -> None:
    shards = [BatchSamplerShard(order(size), ranks, r, even_batches=False) for r in range(ranks)]
    dealt = [list(shard) for shard in shards]
    assert sorted(i for batches in dealt for batch in batches for i in batch) == list(range(size))
    assert [len(batches) for batches in dealt] == [len(shard) for shard in shards]


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize(("size", "ranks", "split", "drop_last"), CASES)
def test_streams_are_dealt_like_maps(size: int, ranks: int, split: bool, drop_last: bool) -> None:
    batch_size = 12 if split else 4
    of_map = [
        [
            i
            for b in BatchSamplerShard(order(size, drop_last, batch_size), ranks, r, split)
            for i in b
        ]
        for r in range(ranks)
    ]
    of_stream = [
        IterableDatasetShard(Stream(size), batch_size, drop_last, ranks, r, split)
        for r in range(ranks)
    ]
    assert [list(shard) for shard in of_stream] == of_map
    assert [len(shard) for shard in of_stream] == [len(samples) for samples in of_map]


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(BadInput, match="batch of 4 among 3"):
        BatchSamplerShard(order(8), 3, 0, split_batches=True)


def test_skipping_leaves_the_rest_as_it_was() -> None:
    whole = list(order(21))
    skipped = SkipBatchSampler(order(21), 2)
    assert list(skipped) == whole[2:]
    assert len(skipped) == len(whole) - 2
