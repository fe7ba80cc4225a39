"""Make a loader again with something changed about it, or less its first batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from anytrain.core.errors import BadInput
from anytrain.engine.data.shard import IterableDatasetShard, SkipBatchSampler
from anytrain.engine.data.workers import sent_home


def rebuild(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a loader like the given one but for `changes`."""
    kept = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "pin_memory_device",
        "in_order",
    )
    options = {name: getattr(loader, name) for name in kept if hasattr(loader, name)}
    options["dataset"] = loader.dataset
    options.update(changes)
    return DataLoader(**options)


def skipping(loader: DataLoader[Any], num_batches: int) -> DataLoader[Any] | None:
    """Return a loader without its first batches, whose samples are never loaded.

    None where that cannot be: a stream can only be read and dropped.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is not None:
        return rebuild(loader, batch_sampler=SkipBatchSampler(loader.batch_sampler, num_batches))
    if hasattr(loader.sampler, "batch_size"):  # a batch sampler in the sampler's place
        batches = SkipBatchSampler(loader.sampler, num_batches)
        return rebuild(loader, sampler=batches, batch_size=None)
    return None


def rest_of_stream(
    loader: DataLoader[Any], num_samples: int, reading: tuple[int, int], turned: int = 0
) -> DataLoader[Any]:
    """Return a loader of what follows a stream's first samples, dealt as the given one deals.

    What several workers read is in the order of their turns, so it is read in these turns still:
    `reading` names how much each reads at once, and how many workers there are. Of the samples
    the first `turned` are counted in whole turns, also where a worker's last one was short.
    """
    shard, changes = loader.dataset, {"num_workers": 0, "prefetch_factor": None}
    rest: Any = RestOfStream(_undealt(shard), num_samples)
    if reading[1]:
        options = {"num_workers": reading[1], "drop_last": loader.drop_last, "collate_fn": list}
        reader = rebuild(loader, dataset=rest.stream, batch_size=reading[0], **options)
        rest.turns = sent_home(iter(reader))  # draws workers' seeds now
        rest.turned, rest.turn_size = turned, reading[0]
    if isinstance(shard, IterableDatasetShard):
        rest = shard.of(rest)
    kept = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    alone = {"persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
    return rebuild(loader, dataset=rest, **kept, **changes, **alone)


def _undealt(dataset: Any) -> Any:
    return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset


class RestOfStream(IterableDataset[Any]):
    """A stream less its first samples, read in turns where several workers do."""

    def __init__(self, stream: Any, num_samples: int) -> None:
        self.stream, self.num_samples = stream, num_samples
        self.turns: Iterator[Any] | None = None
        self.turned, self.turn_size = 0, 1

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # not yet set: a copy is being made
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[Any]:
        if self.turns is None:
            yield from islice(iter(self.stream), self.num_samples, None)
            return
        turned, more = self.turned, self.num_samples - self.turned
        for samples in self.turns:
            rest = samples[turned:]
            turned = max(0, turned - self.turn_size)
            yield from rest[more:]
            more = max(0, more - len(rest))


class SkippedLoader(DataLoader[Any]):
    """A prepared loader less its first batches, for one resumed epoch."""

    def __init__(self, loader: Any, num_batches: int) -> None:
        self.__dict__.update(loader=loader, num_batches=num_batches)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.loader, name, value)

    def __len__(self) -> int:
        return max(0, int(len(self.loader)) - int(self.num_batches))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator
        walked: Iterator[Any] = self.loader.walk_from(self.num_batches)
        return walked


def skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return the loader less its first batches, for the first epoch after a resume."""
    if num_batches < 0:
        raise BadInput(
            f"Cannot skip {num_batches} batches.",
            why="the number of batches to skip counts from 0.",
            fix="pass how many batches of the epoch were already trained on.",
        )
    if hasattr(type(loader), "walk_from"):  # a prepared one
        return SkippedLoader(loader, num_batches)
    skipped = skipping(loader, num_batches)
    if skipped is not None:
        return skipped
    return rebuild(
        loader,
        dataset=_Dropped(loader.dataset, num_batches * (loader.batch_size or 1)),
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
    )


class _Dropped(IterableDataset[Any]):
    """A stream less its first samples."""

    def __init__(self, dataset: Any, num_samples: int) -> None:
        self.dataset, self.num_samples = dataset, num_samples

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.num_samples, None)
