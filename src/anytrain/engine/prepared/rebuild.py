"""Make a loader again with something changed about it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from anytrain.engine.data.shard import SkipBatchSampler


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
