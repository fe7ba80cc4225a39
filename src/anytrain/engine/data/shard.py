"""Deal one order of samples to the ranks.

Every rank walks the same global order and keeps its share. Where the last round is short, it is
filled with samples from the start (`even`), so that no rank waits for one that has run out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from anytrain.core.errors import BadInput
from anytrain.engine.data.position import RestOfBatches, batch_samples


class BatchSamplerShard(BatchSampler):
    """One rank's share of a batch sampler.

    Without `split_batches` whole batches are dealt in turn; with it each batch is cut in equal
    parts. After a pass, `remainder` is the number of samples of the last round that are no
    repeats; 0 means that the last round was full.

    >>> order = BatchSampler(range(5), batch_size=2, drop_last=False)
    >>> [list(BatchSamplerShard(order, 2, rank)) for rank in (0, 1)]
    [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # None where batches vary
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.remainder: int | None = None
        if split_batches:
            check_split(self.batch_size, num_processes)

    @property
    def sampler(self) -> Any:
        """The sampler of single indices below, where there is one."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def after(self, num_samples: int) -> BatchSamplerShard:
        """Return a dealing, among these ranks, of what is left after the order's first samples."""
        size = self.num_processes * batch_samples(self.batch_sampler)
        return BatchSamplerShard(
            RestOfBatches(self.batch_sampler, num_samples, size),
            self.num_processes,
            self.process_index,
            self.split_batches,
            self.even_batches,
        )

    @property
    def total_length(self) -> int:
        """The number of batches over all ranks."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split_batches:
            return total
        rounds, extra = divmod(total, self.num_processes)
        if extra == 0 or self.drop_last:
            return rounds
        return rounds + (1 if self.even_batches or self.process_index < extra else 0)

    def __iter__(self) -> Iterator[list[int]]:
        self.remainder = None
        rounds = _pairs_with_first(self._rounds())
        for first, current in rounds:
            if self._is_full(current):
                self.remainder = 0
                yield self._share(current)
                continue
            if self.drop_last:
                return
            self.remainder = sum(len(batch) for batch in current)
            if head := getattr(self.batch_sampler, "head", None):
                first = [head]  # of the whole epoch, not of what was left of it
            own = self._share(self._fill(current, first) if self.even_batches else current)
            if own:
                yield own

    def _rounds(self) -> Iterator[list[list[int]]]:
        """Yield the batches of one round: as many as there are ranks, or one to be cut."""
        size = 1 if self.split_batches else self.num_processes
        current: list[list[int]] = []
        for batch in self.batch_sampler:
            current.append(list(batch))
            if len(current) == size:
                yield current
                current = []
        if current:
            yield current

    def _is_full(self, current: list[list[int]]) -> bool:
        size = 1 if self.split_batches else self.num_processes
        if len(current) < size:
            return False
        return self.batch_size is None or all(len(batch) == self.batch_size for batch in current)

    def _share(self, current: list[list[int]]) -> list[int]:
        if not self.split_batches:
            return current[self.process_index] if self.process_index < len(current) else []
        part = self.batch_size // self.num_processes
        return current[0][part * self.process_index : part * (self.process_index + 1)]

    def _fill(self, current: list[list[int]], first: list[list[int]]) -> list[list[int]]:
        """Complete the last round with what the first one held, again and again if need be."""
        size = 1 if self.split_batches else self.num_processes
        if self.batch_size is None:  # batches of any size: repeat whole ones
            missing = size - len(current)
            return current + [first[i % len(first)] for i in range(missing)]
        samples = [index for batch in current for index in batch]
        spare = [index for batch in first for index in batch]
        missing = size * self.batch_size - len(samples)
        samples += [spare[i % len(spare)] for i in range(missing)]
        step = self.batch_size
        return [samples[i : i + step] for i in range(0, len(samples), step)]


class IterableDatasetShard(IterableDataset[Any]):
    """One rank's share of a stream of samples."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        if split_batches:
            check_split(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.remainder: int | None = None
        self.epoch = 0

    def of(self, dataset: Any) -> IterableDatasetShard:
        """Return another stream dealt as this one is, in the same epoch."""
        other = IterableDatasetShard(
            dataset,
            self.batch_size,
            self.drop_last,
            self.num_processes,
            self.process_index,
            self.split_batches,
            self.even_batches,
        )
        other.epoch = self.epoch
        return other

    @property
    def round_size(self) -> int:
        """The number of samples of one round over all ranks."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    @property
    def total_dataset_length(self) -> int:
        """The number of samples over all ranks, where the stream knows it."""
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch comes next."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        part = self.round_size // self.num_processes
        rounds = len(self.dataset) / self.round_size
        return (math.floor(rounds) if self.drop_last else math.ceil(rounds)) * part

    def __iter__(self) -> Iterator[Any]:
        self.remainder = None
        self._seed_generator()
        for first, current in _pairs_with_first(self._rounds()):
            missing = self.round_size - len(current)
            if missing and self.drop_last:
                self.remainder = 0
                return
            self.remainder = len(current) if missing else 0
            if missing and self.even_batches:
                current = current + [first[i % len(first)] for i in range(missing)]
            part = self.round_size // self.num_processes
            yield from current[part * self.process_index : part * (self.process_index + 1)]

    def _rounds(self) -> Iterator[list[Any]]:
        current: list[Any] = []
        for sample in self.dataset:
            current.append(sample)
            if len(current) == self.round_size:
                yield current
                current = []
        if current:
            yield current

    def _seed_generator(self) -> None:
        generator = getattr(self.dataset, "generator", None)
        if generator is not None and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)


class SkipBatchSampler(BatchSampler):
    """A batch sampler less its first batches; their samples are never loaded."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # None where batches vary
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def remainder(self) -> int | None:
        """What the sampler below says of its last round."""
        return getattr(self.batch_sampler, "remainder", None)

    @property
    def total_length(self) -> int:
        """The number of batches before any was skipped."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        for position, batch in enumerate(self.batch_sampler):
            if position >= self.skip_batches:
                yield batch


def check_split(batch_size: int | None, num_processes: int) -> None:
    """Refuse a batch that cannot be cut in equal parts."""
    if batch_size is None:
        raise BadInput(
            "Cannot split batches whose size is not known.",
            why="neither the loader nor its batch sampler has a `batch_size`.",
            fix="give the batch sampler a `batch_size`, or pass split_batches=False.",
        )
    if batch_size % num_processes != 0:
        raise BadInput(
            f"Cannot split a batch of {batch_size} among {num_processes} processes.",
            why="with split_batches=True each process takes an equal part of every batch.",
            fix=f"make the batch size a round multiple of {num_processes}.",
        )


def _pairs_with_first(rounds: Iterator[list[Any]]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield (first round, this round)."""
    first: list[Any] | None = None
    for current in rounds:
        if first is None:
            first = current
        yield first, current


class IterableBatches(IterableDataset[Any]):
    """A stream of whole batches; its length and its epoch are those of the iterable."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, where the iterable wants to know."""
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)


def identity(batch: Any) -> Any:
    """Return the batch: it was collated already."""
    return batch


def split(inputs: Any, size: int, rank: int, *, pad: bool = False) -> Any:
    """Return this rank's part; with `pad`, short parts repeat the last item.

    >>> split([1, 2, 3, 4, 5], size=2, rank=0), split([1, 2, 3, 4, 5], size=2, rank=1)
    ([1, 2, 3], [4, 5])
    >>> split([1, 2, 3], size=2, rank=1, pad=True)
    [3, 3]

    What is one thing, such as a prompt, is everyone's.

    >>> split("a dog", size=2, rank=1)
    'a dog'
    """
    if size == 1 or isinstance(inputs, str | bytes) or not hasattr(inputs, "__len__"):
        return inputs
    length = _length(inputs)
    each, extra = divmod(length, size)
    start = rank * each + min(rank, extra)
    stop = start + each + (1 if rank < extra else 0)
    longest = each + (1 if extra else 0)
    return _part(inputs, start, stop, longest if pad else 0)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        return len(inputs)
    lengths = {len(value) for value in inputs.values()}
    if len(lengths) != 1:
        raise BadInput(
            f"Cannot split a dict whose values have the lengths {sorted(lengths)}.",
            why="each rank takes the same positions of every value.",
            fix="make the values equally long.",
        )
    return lengths.pop()


def _part(inputs: Any, start: int, stop: int, pad_to: int) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _part(value, start, stop, pad_to) for key, value in inputs.items()}
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):  # datasets.Dataset
        positions = list(range(start, stop))
        positions += [len(inputs) - 1] * (pad_to - len(positions))
        return inputs.select(positions)
    own = inputs[start:stop]
    missing = pad_to - len(own)
    if missing <= 0:
        return own
    if isinstance(own, torch.Tensor):
        return torch.cat([own, inputs[-1:].expand(missing, *inputs.shape[1:])])
    return own + type(own)([inputs[-1]] * missing)
