"""Orders that put samples of like length together, so that less is padded.

Both are functions of the lengths, the seed and the epoch, so that every rank and every resume
deals the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from anytrain.core.errors import BadInput
from anytrain.engine.data.position import LaidOut

_MOST_BATCHES = 50
_FEWEST_MEGABATCHES = 4
_ATTENTION = 0.001


class GroupedByLength(LaidOut, Sampler[int]):
    """A shuffled order whose runs of `batch_size` have samples of like length.

    The shuffled samples are cut in megabatches of up to 50 batches (at least four of them, where
    there are enough samples), each sorted by length. The longest sample of all comes first, so
    that a batch too big for memory shows at once.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, *, seed: int = 0) -> None:
        self.lengths = _plain(lengths)
        self.batch_size = _at_least_one("batch_size", batch_size)
        self.layout = {"batch_size": self.batch_size, "seed": seed}

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        lengths, count = self.lengths, len(self.lengths)
        batch_size, seed = (self.order_layout()[name] for name in ("batch_size", "seed"))
        order = _shuffled(count, seed + self.epoch)
        batches = min(count // (batch_size * _FEWEST_MEGABATCHES), _MOST_BATCHES)
        size = max(batches, 1) * batch_size
        parts = [
            sorted(order[start : start + size], key=lengths.__getitem__, reverse=True)
            for start in range(0, count, size)
        ]
        if parts:
            longest = max(range(len(parts)), key=lambda part: lengths[parts[part][0]])
            parts[0][0], parts[longest][0] = parts[longest][0], parts[0][0]
        return (index for part in parts for index in part)


class Rebalanced(LaidOut, BatchSampler):
    """Micro-batches of unlike sizes and like cost: few long samples, or many short ones.

    The samples of an optimizer step are a shuffled order's next `step_size`, sorted by length
    and cut in `num_ranks * accumulation` micro-batches so that the dearest is as cheap as can be.
    They come in the order in which batches are dealt: one for each rank, the dearest first. The
    cost of a micro-batch is that of its padded tokens, and of attention over them.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        step_size: int,
        *,
        num_ranks: int = 1,
        accumulation: int = 1,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        self.lengths = _plain(lengths)
        self.parts = _at_least_one("num_ranks * accumulation", num_ranks * accumulation)
        self.step_size = step_size
        self.batch_size = None  # type: ignore[assignment]  # batches vary
        self.drop_last = drop_last
        self.layout = {"seed": seed, "cut": (step_size, self.parts, 0)}
        self.num_samples = len(self.lengths)
        self.usual_size = max(step_size // self.parts, 1)
        if step_size < self.parts:
            raise BadInput(
                f"Cannot cut a step of {step_size} samples in {self.parts} micro-batches.",
                why=f"{num_ranks} ranks accumulate {accumulation} micro-batches each, and each "
                "needs a sample.",
                fix="take a bigger batch, or accumulate less.",
            )

    def __len__(self) -> int:
        steps = len(self.lengths) / self.step_size
        return (math.floor(steps) if self.drop_last else math.ceil(steps)) * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches_after(0)

    def batches_after(self, num_samples: int) -> Iterator[list[int]]:
        """Yield what is left of the epoch after the first samples of its shuffled order.

        A step that was begun goes on with its other micro-batches, as it was cut. Where steps are
        cut otherwise now it comes again as a whole: nobody can tell which of its samples are left.
        """
        layout, own = self.order_layout(), (self.step_size, self.parts)
        step_size, parts, begun = layout.get("cut") or (*own, 0)
        into = (num_samples - begun) % step_size
        first, num_seen = num_samples - into, into // self.usual_size
        if (step_size, parts) != own:
            num_seen = 0
            self.keep_layout({**layout, "cut": (*own, first)}, self.epoch)
        return islice(self._batches_from(first), num_seen, None)

    def _batches_from(self, first: int) -> Iterator[list[int]]:
        order = _shuffled(len(self.lengths), self.order_layout()["seed"] + self.epoch)
        for start in range(first, len(order), self.step_size):
            step = order[start : start + self.step_size]
            if len(step) < self.step_size and self.drop_last:
                return
            step += [order[i % len(order)] for i in range(self.parts - len(step))]
            yield from self._cut(sorted(step, key=self.lengths.__getitem__, reverse=True))

    def _cut(self, step: list[int]) -> list[list[int]]:
        """Return the step's micro-batches, the dearest first."""
        costs = [_cost(self.lengths[index]) for index in step]
        sizes = _sizes(costs, self.parts)
        starts = [sum(sizes[:part]) for part in range(self.parts)]
        ranges = sorted(
            zip(starts, sizes, strict=True), key=lambda cut: cut[1] * costs[cut[0]], reverse=True
        )
        return [step[start : start + size] for start, size in ranges]


def _sizes(costs: list[float], parts: int) -> list[int]:
    """Return the sizes of the runs, as many as `parts`, whose dearest is cheapest.

    Costs fall; a run costs its first, dearest sample's cost times its size.

    >>> _sizes([8.0, 2.0, 2.0, 2.0, 2.0], 2)
    [1, 4]
    """
    low, high = max(costs), costs[0] * len(costs)
    best = _packed(costs, parts, high)
    for _ in range(50):  # halves the interval to what a float can tell
        middle = (low + high) / 2
        if not low < middle < high:
            break
        sizes = _packed(costs, parts, middle)
        if sizes is None:
            low = middle
        else:
            best, high = sizes, middle
    lowest = _packed(costs, parts, low)
    chosen = lowest if lowest is not None else best
    assert chosen is not None
    return chosen


def _packed(costs: list[float], parts: int, most: float) -> list[int] | None:
    """Return runs that cost no more than `most` each; None where it takes more of them."""
    sizes: list[int] = []
    start = 0
    while start < len(costs):
        if len(sizes) == parts:
            return None
        after = parts - len(sizes) - 1  # runs still to come, each with a sample
        fits = int(most / costs[start] * (1 + 1e-12)) if costs[start] else len(costs)
        size = max(1, min(fits, len(costs) - start - after))
        sizes.append(size)
        start += size
    return sizes if len(sizes) == parts else None


def _cost(length: int) -> float:
    return length + _ATTENTION * length * length


def lengths_of(dataset: Any, column: str = "length", input_name: str | None = None) -> list[int]:
    """Return each sample's length: as its column says, else as many as its inputs are.

    The column is looked for in a dataset that has columns, as those of `datasets`. A dataset
    that knows its samples' lengths (`lengths`) is not read for them.
    """
    columns = getattr(dataset, "column_names", None) or ()
    if column in columns:
        return _plain(dataset[column])
    name = input_name or "input_ids"
    if name in columns:
        return _column_lengths(dataset, name)
    known = getattr(dataset, "lengths", None) if input_name in (None, "input_ids") else None
    if known is not None and not callable(known) and len(known) == len(dataset):
        return _plain(known)
    first = dataset[0] if len(dataset) else {name: ()}
    if not isinstance(first, Mapping) or name not in first:
        raise BadInput(
            "Cannot group by length: the lengths of the samples are not known.",
            why=f"the dataset has no column {column!r}, and its samples have no {name!r} to count.",
            fix="add a column of lengths (length_column_name), use another "
            "train_sampling_strategy, or leave length_buckets out.",
        )
    return [len(dataset[index][name]) for index in range(len(dataset))]


def quick_lengths(dataset: Any, name: str = "input_ids") -> list[int] | None:
    """Return each sample's length where that needs no reading of samples; else None."""
    known = getattr(dataset, "lengths", None)
    if name in (getattr(dataset, "column_names", None) or ()):
        return _column_lengths(dataset, name)
    if known is not None and not callable(known) and len(known) == len(dataset):
        return _plain(known)
    if isinstance(dataset, list) and all(
        isinstance(row, Mapping) and name in row for row in dataset
    ):
        return [len(row[name]) for row in dataset]
    return None


def _column_lengths(dataset: Any, name: str) -> list[int]:
    """Return how long a column's values are, without making them where arrow can tell."""
    if hasattr(dataset, "with_format") and hasattr(dataset, "select_columns"):
        import pyarrow.compute
        import pyarrow.types

        column = dataset.select_columns([name]).with_format("arrow")[:][name]
        if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
            found: list[int] = pyarrow.compute.list_value_length(column).to_pylist()
            return found
    return [len(value) for value in dataset[name]]


def _plain(lengths: Any) -> list[int]:
    """Return lengths as python numbers: a tensor's are slow to compare."""
    return [length.item() if hasattr(length, "item") else length for length in lengths]


def _shuffled(count: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise BadInput(
            f"Cannot group samples with {name}={value}.",
            why="a batch needs a sample.",
            fix="pass 1 or more.",
        )
    return value
