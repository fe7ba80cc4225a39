"""A few lengths for a whole run: chosen from the data, and batches that keep to them.

Whatever is made once for each shape (a recorded graph, a compiled kernel, an allocator's blocks)
is then made a few times. Lengths are chosen so that least is padded; a batch holds samples of one
of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from anytrain.core.errors import BadInput
from anytrain.engine.data.position import LaidOut
from anytrain.engine.data.seeded import mix

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def choose(
    lengths: Any,
    most: int = 8,
    multiple: int = 8,
    *,
    limit: int | None = None,
    cost_per_shape: float = 0.0,
) -> tuple[int, ...]:
    """Return the lengths to pad to, `most` at most, that make the fewest tokens in one pass.

    They are multiples of `multiple`, as matrix units like it, but none is above `limit`, the
    longest that a model reads, unless a sample is. A shape is worth what it saves: it counts as
    `cost_per_shape` tokens.

    >>> choose([5, 6, 7, 30, 31, 32, 120], most=2)
    (32, 120)
    >>> choose([5, 6, 7, 30, 31, 32, 120], most=8, cost_per_shape=50)
    (8, 32, 120)
    """
    values, counts = _histogram(lengths, multiple, limit)
    below = np.concatenate([[0], np.cumsum(counts)])  # samples of the first so many values
    num = len(values)
    most = min(most, num)
    # best[k, j]: the tokens of the first j values in k lengths; came[k, j]: where the last begins
    best = np.full((most + 1, num + 1), np.inf)
    came = np.zeros((most + 1, num + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for end in range(1, num + 1):
        last = (below[end] - below[:end]) * values[end - 1]
        totals = best[:-1, :end] + last
        came[1:, end] = totals.argmin(axis=1)
        best[1:, end] = totals.min(axis=1)
    shapes = int(np.argmin(best[1:, num] + cost_per_shape * np.arange(1, most + 1))) + 1
    found, end = [], num
    for count in range(shapes, 0, -1):
        found.append(int(values[end - 1]))
        end = int(came[count, end])
    return tuple(reversed(found))


def _histogram(lengths: Any, multiple: int, limit: int | None) -> tuple[Numbers, Numbers]:
    """Return the lengths that occur, rounded up, and how many samples each has."""
    given = np.asarray(lengths, dtype=np.int64)
    if not given.size:
        raise BadInput(
            "Cannot choose lengths to pad to.",
            why="there is no sample whose length could be looked at.",
            fix="check how the data was read and filtered, or name the lengths.",
        )
    rounded = -(-np.maximum(given, 1) // multiple) * multiple
    if limit is not None:
        rounded = np.minimum(rounded, np.maximum(given, limit))
    return np.unique(rounded, return_counts=True)


def padding_share(lengths: Any, padded: Any) -> float:
    """Return which share of the tokens is padding, where each sample is padded to so many.

    >>> padding_share([5, 5], 10)
    0.5
    """
    own = np.asarray(lengths, dtype=np.int64)
    return float(1 - own.sum() / np.broadcast_to(padded, own.shape).sum())


class Bucketed(LaidOut, BatchSampler):
    """Full batches of one bucket each, in an order that seed and epoch decide.

    A bucket's samples are shuffled, and cut in steps of `batches_per_step` batches. Those that
    fill no step move up to the next longer bucket, so that one batch of the whole epoch, the
    last, may not be full. Steps come shuffled; one of the longest is first, so that a batch too
    big for memory shows at once, and smaller ones find its memory.
    """

    def __init__(
        self,
        lengths: Any,
        buckets: Sequence[int],
        batch_size: int,
        *,
        batches_per_step: int = 1,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_samples = len(self.lengths)
        self.layout = {
            "buckets": [int(length) for length in sorted(buckets)],
            "batch_size": batch_size,
            "step_size": batch_size * batches_per_step,
            "seed": seed,
        }

    def __len__(self) -> int:
        batches = len(self.lengths) / self.batch_size
        return math.floor(batches) if self.drop_last else math.ceil(batches)

    def order(self) -> list[int]:
        """Return the epoch's samples, also those that `drop_last` leaves out of its batches."""
        order: list[int] = self._order().tolist()
        return order

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def _order(self) -> Numbers:
        """Return the epoch's samples, one after the other: by the layout alone."""
        layout = self.order_layout()
        size, step = int(layout["batch_size"]), int(layout["step_size"])
        buckets = layout["buckets"]
        draw = torch.Generator().manual_seed(mix(layout["seed"], self.epoch) & (2**63 - 1))
        bucket_of = np.searchsorted(buckets, self.lengths).clip(max=len(buckets) - 1)
        carried = np.empty(0, dtype=np.int64)
        steps: list[Numbers] = []
        for bucket in range(len(buckets)):
            own = _shuffled(np.flatnonzero(bucket_of == bucket), draw)
            whole = (len(carried) + len(own)) // step * step
            cut = max(0, whole - len(carried))  # who has moved up goes first, and no further
            dealt = _dealt(carried[:whole], own[:cut], size, draw)
            steps.extend(dealt.reshape(-1, step))
            carried = np.concatenate([carried[whole:], own[cut:]])
        longest = bucket_of[carried] == len(buckets) - 1
        tail = _dealt(carried[~longest], carried[longest], size, draw)
        places = torch.randperm(len(steps), generator=draw).tolist()
        if steps:
            first = places.index(len(steps) - 1)  # steps were made from short to long
            places[0], places[first] = places[first], places[0]
        return np.concatenate([*(steps[place] for place in places), tail])

    def padded(self) -> Numbers:
        """Return how long each sample of the epoch is made, in its order, batch by batch."""
        buckets = np.asarray(self.order_layout()["buckets"])
        order = self._order()
        begins = np.arange(0, len(order), self.batch_size)
        longest = np.maximum.reduceat(self.lengths[order], begins)
        place = np.searchsorted(buckets, longest).clip(max=len(buckets) - 1)
        made: Numbers = np.maximum(longest, buckets[place]).repeat(self.batch_size)[: len(order)]
        return made


def _dealt(carried: Numbers, own: Numbers, batch_size: int, draw: torch.Generator) -> Numbers:
    """Return samples mixed, a bucket's own first in each batch: they decide how long it is."""
    total = len(carried) + len(own)
    heads = np.arange(0, total, batch_size)[: len(own)]
    dealt = np.empty(total, dtype=np.int64)
    others = np.ones(total, dtype=np.bool_)
    others[heads] = False
    dealt[heads] = own[: len(heads)]
    dealt[others] = _shuffled(np.concatenate([carried, own[len(heads) :]]), draw)
    return dealt


def _shuffled(samples: Numbers, draw: torch.Generator) -> Numbers:
    mixed: Numbers = samples[torch.randperm(len(samples), generator=draw).numpy()]
    return mixed
