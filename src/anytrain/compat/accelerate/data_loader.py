"""Data loaders that yield this rank's batches, under HF's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.state import GradientState
from anytrain.compat.accelerate.utils.dataclasses import RNGType
from anytrain.doors.accelerator.states import live_session
from anytrain.engine.assemble.loaders import LoaderOptions, prepare_loader
from anytrain.engine.assemble.session import Session
from anytrain.engine.data.prefetch import Placement
from anytrain.engine.data.seeded import SeedableRandomSampler
from anytrain.engine.data.shard import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler
from anytrain.engine.prepared import rebuild
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.prepared.walk import Walk

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]

__getattr__ = refused.module_getattr(__name__)


class DataLoaderStateMixin:
    """What a loader tells the run while it is walked."""

    walk: Walk
    end_of_dataloader: bool
    remainder: int

    @property
    def gradient_state(self) -> GradientState:
        """Where the run's loop stands between two updates."""
        view: GradientState = GradientState._of(self.walk.cursor)  # type: ignore[assignment]  # of the class it is called on
        return view

    @property
    def num_last(self) -> int:
        """How many rows of the last round count; 0 or less: all."""
        return self.remainder

    def reset(self) -> None:
        """Forget that an end was near."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Tell the run that this loader is being walked."""
        self.reset()
        self.walk.cursor.enter(self)

    def end(self) -> None:
        """Tell the run that this loader was left."""
        self.walk.cursor.leave(self)


class DataLoaderAdapter(PreparedLoader):
    """A prepared loader made by hand, from what a DataLoader is made from."""

    _is_accelerate_prepared = True
    skip_batches = 0

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        *,
        walk: Walk | None = None,
        drop_last: bool = False,
        skip_batches: int = 0,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if batch_sampler is not None:
            kwargs["batch_sampler"] = batch_sampler
        super().__init__(DataLoader(dataset, **kwargs), walk or _walk(), drop_last)
        self.__dict__.update(
            skip_batches=skip_batches,
            iteration=iteration,
            use_stateful_dataloader=use_stateful_dataloader,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator
        return self.walk_from(self.skip_batches or None)

    def set_sampler(self, sampler: Any) -> None:
        """Draw indices from another sampler."""
        batches: Any = self.batch_sampler
        while getattr(batches, "batch_sampler", None) is not None:
            batches = batches.batch_sampler
        if isinstance(batches, BatchSampler):
            batches.sampler = sampler
        else:
            object.__setattr__(self.base_dataloader, "sampler", sampler)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, at the next walk, after the batches that the state counts."""
        super().load_state_dict(state_dict)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: the position is that of what was handed out, not of what was read ahead."""

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {name: self.__dict__[name] for name in self.__dict__ if name != "base_dataloader"}
        return _restored, (type(self), self.base_dataloader, kept)


def _restored(kind: type[PreparedLoader], base: DataLoader[Any], kept: dict[str, Any]) -> Any:
    loader = kind.__new__(kind)
    PreparedLoader.__init__(loader, base, kept["walk"], kept["_drop_last"])
    loader.__dict__.update(kept)
    return loader


def _walk(device: Any = None, non_blocking: bool = False, **options: Any) -> Walk:
    """Return what a loader needs of the current run; without a device batches stay put."""
    found = live_session()
    placement = None
    if device is not None:
        placement = Placement(found.backend, torch.device(device), non_blocking)
    return Walk(
        cursor=found.cursor,
        world=found.world,
        backend=found.backend,
        device=found.device,
        placement=placement,
        **options,
    )


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader whose samples are this rank's share already."""

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        rng_types: list[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            use_stateful_dataloader,
            walk=_walk(
                device,
                _non_blocking,
                rng_types=tuple(str(kind) for kind in rng_types or ()),
                generator=synchronized_generator,
            ),
            drop_last=_drop_last,
            skip_batches=skip_batches,
            iteration=iteration,
            **kwargs,
        )


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that the main process reads for all."""

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            use_stateful_dataloader,
            walk=_walk(
                live_session().device,
                _non_blocking,
                dispatching=True,
                split_batches=split_batches,
                slice_fn=slice_fn,
            ),
            drop_last=_drop_last,
            skip_batches=skip_batches,
            iteration=iteration,
            **kwargs,
        )


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader without its first batches."""

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, skip_batches=skip_batches, **kwargs)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


@dataclass(frozen=True)
class _WorldAt:
    """A world seen from another place: how batches would be dealt to that rank."""

    world: Any
    size: int
    rank: int

    def __getattr__(self, name: str) -> Any:
        if name == "world":  # not yet set: a copy is being made
            raise AttributeError(name)
        return getattr(self.world, name)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """Return the loader dealt to a rank: this one's, unless another is named."""
    prepared = prepare_loader(
        dataloader,
        _session_at(live_session(), device, num_processes, process_index),
        LoaderOptions(
            split_batches=split_batches,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=non_blocking,
            rng_types=tuple(str(kind) for kind in rng_types or ()),
        ),
        place=put_on_device,
        slice_fn=slice_fn_for_dispatch,
    )
    to_hf_class(prepared)
    return prepared


def _session_at(found: Session, device: Any, size: int | None, rank: int | None) -> Session:
    world = found.world
    place: Any = _WorldAt(
        world, world.size if size is None else size, world.rank if rank is None else rank
    )
    same = (place.size, place.rank) == (world.size, world.rank)
    return replace(
        found,
        device=found.device if device is None else torch.device(device),
        world=world if same else place,
    )


def to_hf_class(loader: PreparedLoader) -> None:
    """Let a loader that was prepared be of HF's class for its kind."""
    if type(loader) is PreparedLoader:
        kind = DataLoaderDispatcher if loader.walk.dispatching else DataLoaderShard
        object.__setattr__(loader, "__class__", kind)


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler of single indices."""
    if isinstance(dataloader, PreparedLoader):
        return dataloader.get_sampler()
    if isinstance(dataloader.sampler, BatchSampler):
        return dataloader.sampler.sampler
    return getattr(dataloader.batch_sampler, "sampler", None)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return the loader less its first batches, for the first epoch after a resume."""
    return rebuild.skip_first_batches(dataloader, num_batches)
