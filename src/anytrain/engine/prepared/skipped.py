"""Loaders less their first batches, for the first epoch after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from anytrain.core.errors import BadInput
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.prepared.rebuild import rebuild, skipping


class SkippedLoader(DataLoader[Any]):
    """A prepared loader less its first batches, for one resumed epoch."""

    def __init__(self, loader: PreparedLoader, num_batches: int) -> None:
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
    if isinstance(loader, PreparedLoader):
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
