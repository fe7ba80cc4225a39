"""How a prepared loader's samples are dealt: in what rounds, and where in them a position is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset

from anytrain.engine.data.grouped import Rebalanced
from anytrain.engine.data.position import (
    LaidOut,
    Position,
    RestOfBatches,
    batch_samples,
    order_length,
)
from anytrain.engine.data.shard import BatchSamplerShard, IterableDatasetShard

if TYPE_CHECKING:
    from anytrain.engine.prepared.loader import PreparedLoader


class PlaceInRound(NamedTuple):
    """Where a saved position is in an epoch, counted in batches of the loader that goes on."""

    batches: int
    """Batches of this loader that the samples make which are done; a part of one is one."""
    left: int | None
    """Batches that follow; None where nobody knows."""
    share: float | None
    """The share of the epoch that is done; None where nobody knows."""


class Dealt:
    """How a loader's samples are dealt to the ranks."""

    def __init__(self, loader: PreparedLoader) -> None:
        self._loader = loader

    def source(self) -> Any:
        """What knows how the samples were dealt."""
        loader = self._loader
        if loader._dealer is not None:  # it deals the rest of an epoch taken up in its middle
            return loader._dealer
        if isinstance(loader.dataset, IterableDataset):
            return loader.dataset
        return loader.sampler if loader.batch_sampler is None else loader.batch_sampler

    def laid_out(self) -> LaidOut | None:
        """Return the sampler whose order follows from a layout as well; None where none does."""
        source = self.source()
        while source is not None and not isinstance(source, LaidOut):
            below = getattr(source, "batch_sampler", None)
            source = getattr(source, "sampler", None) if below is None else below
        return source

    def layout(self, epoch: int) -> Mapping[str, Any] | None:
        """Return what of a layout decides an epoch's order; None where nothing does."""
        held = self.laid_out()
        return None if held is None else held.order_layout(epoch)

    @property
    def per_batch(self) -> int:
        """How many batches of the global order make one that is handed out."""
        if self._loader.walk.dispatching:
            return 1 if self._loader.walk.split_batches else self._loader.walk.world.size
        source = self.source()
        is_dealt = isinstance(source, (BatchSamplerShard, IterableDatasetShard))
        return source.num_processes if is_dealt and not source.split_batches else 1

    @property
    def round_size(self) -> int:
        """How many samples of the order all ranks together take at once."""
        return self.per_batch * self.batch_samples

    @property
    def batch_samples(self) -> int:
        """How many samples one batch of the global order stands for."""
        if not isinstance(self._loader.dataset, IterableDataset):
            return batch_samples(self.undealt())
        is_dealt = isinstance(self._loader.dataset, IterableDatasetShard)
        source: Any = self._loader.dataset if is_dealt else self._loader.base_dataloader
        return source.batch_size or 1

    @property
    def base_size(self) -> int:
        """How many samples of the order make one batch of the loader below."""
        return self.batch_samples if self._loader.walk.dispatching else self.round_size

    @property
    def own_reading(self) -> tuple[int, int]:
        """In what order a stream is read: by how many workers, and how much of each in turn."""
        workers = self._loader.base_dataloader.num_workers
        is_stream = isinstance(self._loader.dataset, IterableDataset)
        return (self.base_size, workers) if workers and is_stream else (0, 0)

    def num_samples(self) -> int | None:
        """Return how many samples an epoch's order has; None where nobody knows."""
        dataset: Any = self._loader.dataset
        if not isinstance(dataset, IterableDataset):
            return order_length(self.undealt())
        return _length(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset)

    def undealt(self) -> Any:
        """Return what yields all ranks' batches, in their order."""
        source = self.source()
        while isinstance(source, (BatchSamplerShard, RestOfBatches)):
            source = source.batch_sampler
        return source

    def place_of(self, state: Mapping[str, Any], *, drop_last: bool) -> PlaceInRound:
        """Return where a saved position is, counted in this loader's batches."""
        position, total = self.position_in(state), self.num_samples()
        undealt, together = self.undealt(), 1
        if isinstance(undealt, Rebalanced):  # its steps are cut as a whole
            together = max(undealt.step_size // position.round_size, 1)
        steps = replace(position, round_size=position.round_size * together)
        left = steps.rounds_left(total, drop_last=drop_last)
        left = None if left is None else left * together
        share = None if total is None else min(1.0, position.samples / max(total, 1))
        return PlaceInRound(position.rounds, left, 1.0 if left == 0 else share)

    def position_in(self, state: Mapping[str, Any]) -> Position:
        """Return a saved position; the versions that counted batches had none of another size."""
        size = self.round_size
        if state["at_start"] is None:  # between two epochs
            return Position(0, size)
        if "samples" not in state:
            return Position(state["done"] * self.batch_samples, size)
        return Position(state["samples"], size, state["ended"])

    @property
    def total_batch_size(self) -> int:
        source: Any = self.source()
        if source is None or not hasattr(source, "batch_size"):
            source = self._loader.base_dataloader
        size = int(source.batch_size)
        if self._loader.walk.dispatching:
            return size if self._loader.walk.split_batches else size * self._loader.walk.world.size
        if getattr(source, "split_batches", False):
            return size
        return size * int(_innermost(source, "num_processes", 1))

    @property
    def total_dataset_length(self) -> int:
        dataset: Any = self._loader.dataset
        return int(getattr(dataset, "total_dataset_length", None) or len(dataset))


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def _innermost(source: Any, name: str, default: Any) -> Any:
    while source is not None:
        if hasattr(source, name):
            return getattr(source, name)
        source = getattr(source, "batch_sampler", None)
    return default
