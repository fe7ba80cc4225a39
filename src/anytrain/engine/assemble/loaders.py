"""Make a data loader yield this rank's batches, as steps, and count the items of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    default_collate,
)

from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.engine import objective
from anytrain.engine.assemble.session import Session
from anytrain.engine.data.compiled_shapes import LoaderShapes
from anytrain.engine.data.prefetch import Placement
from anytrain.engine.data.seeded import (
    SeedableRandomSampler,
    SeededBatchSampler,
    SeededCollate,
    SeededDataset,
    draws_nothing,
)
from anytrain.engine.data.shard import (
    BatchSamplerShard,
    IterableBatches,
    IterableDatasetShard,
    check_split,
    identity,
)
from anytrain.engine.data.workers import AutoWorkers, PatientWorker
from anytrain.engine.loop import Feed
from anytrain.engine.metrics import num_own_rows, own_rows
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.prepared.rebuild import rebuild
from anytrain.engine.prepared.walk import Walk
from anytrain.engine.tree import num_rows
from anytrain.machine.backends.cpu import cores_each


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How loaders are dealt; the fields are those of the door's DataLoaderConfiguration."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    rng_types: tuple[str, ...] = ("generator",)


def prepare_loader(
    loader: DataLoader[Any],
    session: Session,
    options: LoaderOptions,
    *,
    place: bool,
    slice_fn: Callable[..., Any] | None = None,
    auto_workers: bool = False,
) -> PreparedLoader:
    """Return the loader dealt to this rank, its batches placed on the device.

    With `auto_workers`, a loader without workers may get some once loading holds the run up.
    """
    world = session.world
    streams = isinstance(loader.dataset, IterableDataset)
    dispatching = _dispatching(options, place, streams)
    if options.split_batches and world.size > 1:
        check_split(batch_size(loader), world.size)
    drop_last = bool(loader.drop_last or getattr(_batch_sampler(loader), "drop_last", False))
    base = _seeded(loader, options)
    # A generator that the user has given is part of the position, also in one process.
    generator = getattr(getattr(_batch_sampler(base), "sampler", None), "generator", None)
    if world.size > 1 and not dispatching:
        base, generator = _sharded(base, session, options)
    base, seeded = _with_sample_seeds(_patient(base))
    walk = Walk(
        cursor=session.cursor,
        ledger=session.ledger,
        world=world,
        backend=session.backend,
        device=session.device,
        placement=Placement(session.backend, session.device, options.non_blocking)
        if place
        else None,
        rng_types=tuple(
            kind for kind in options.rng_types if kind != "generator" or generator is not None
        ),
        generator=generator,
        dispatching=dispatching,
        split_batches=options.split_batches,
        slice_fn=slice_fn,
        seeded=seeded,
        stream=_stream(base),
        given=loader,
        workers=_auto_workers(base, session) if auto_workers and not dispatching else None,
        shapes=_watched(session, loader.collate_fn),
    )
    # Shared here, where every rank is: later a single rank may look at a batch alone.
    seed = world.broadcast_object(torch.initial_seed()) if seeded is not None else None
    return PreparedLoader(base, walk, drop_last, seed)


def tell_if_empty(loader: DataLoader[Any]) -> None:
    """Give notice of a loader that has no batch: a loop over it does nothing, and says nothing."""
    if isinstance(loader.dataset, IterableDataset):
        return
    drop_last = loader.drop_last or getattr(_batch_sampler(loader), "drop_last", False)
    try:
        samples: int = len(loader.dataset)  # type: ignore[arg-type]  # it may have no length
    except (TypeError, AttributeError, NotImplementedError):
        return
    size = batch_size(loader) or 1
    if samples and not (drop_last and samples < size):
        return
    why = f"{samples} samples make no batch of {size}, and drop_last leaves out the last one."
    give_notice(
        "This data loader has no batch: a loop over it does nothing.\n"
        f"  why: {why if samples else 'its data set has no sample.'}\n"
        "  fix: look at how the data set was read and filtered"
        f"{', or pass drop_last=False' if samples else ''}.",
        stacklevel=4,
    )


def _auto_workers(loader: DataLoader[Any], session: Session) -> AutoWorkers | None:
    """Return what chooses a number of workers; None where there is nothing to choose."""
    indexed = loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)
    if loader.num_workers or not indexed or type(loader) is not DataLoader:
        return None

    def tell(value: str, because: str) -> None:
        session.revise("workers", value, because, session.cursor.updates)

    return AutoWorkers(cores_each(session.environment.place.local_size), tell)


def given_loader(batches: Any, session: Session) -> PreparedLoader:
    """Return any iterable of batches as a loader: dealt out already, placed on the device here."""
    base: DataLoader[Any] = DataLoader(
        IterableBatches(batches), batch_size=None, collate_fn=identity
    )
    walk = Walk(
        cursor=session.cursor,
        ledger=session.ledger,
        world=session.world,
        backend=session.backend,
        device=session.device,
        placement=Placement(session.backend, session.device),
        shapes=_watched(session),
    )
    return PreparedLoader(base, walk, drop_last=False)


def _watched(session: Session, collate: Any = None) -> LoaderShapes | None:
    """Return what knows a loader's new shapes; None where nothing is compiled for them."""
    if session.graphs is None:
        return None
    return LoaderShapes(session.graphs, collate, session.cursor.accumulation.num_steps)


def _patient(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Let loading workers outlive a signal for as long as the last step takes."""
    if loader.num_workers == 0 or type(loader) is not DataLoader:
        return loader
    first = PatientWorker(loader.worker_init_fn)
    if loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
        return rebuild(loader, batch_sampler=loader.batch_sampler, worker_init_fn=first)
    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    return rebuild(
        loader,
        sampler=sampler,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        worker_init_fn=first,
    )


def _with_sample_seeds(
    loader: DataLoader[Any],
) -> tuple[DataLoader[Any], SeededBatchSampler | None]:
    """Remember which samples are dealt; let each be loaded under its own seed, if it may draw."""
    own_way = type(loader).__iter__ is not DataLoader.__iter__
    indexed = loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)
    if own_way or not indexed:
        return loader, None
    if draws_nothing(loader.dataset, loader.collate_fn):
        if loader.collate_fn is default_collate:  # a user's own loop: nobody asks for its samples
            return loader, None
        seeded = SeededBatchSampler(loader.batch_sampler, seeds=False)
        return rebuild(loader, batch_sampler=seeded), seeded
    seeded = SeededBatchSampler(loader.batch_sampler)
    dataset, collate = SeededDataset(loader.dataset), SeededCollate(loader.collate_fn)
    return rebuild(loader, dataset=dataset, batch_sampler=seeded, collate_fn=collate), seeded


def _stream(loader: DataLoader[Any]) -> Any:
    """Return the stream if it can tell and take its place, in this process."""
    stream: Any = loader.dataset
    if isinstance(stream, IterableDatasetShard):
        stream = stream.dataset
    able = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
    return (
        stream if able and isinstance(stream, IterableDataset) and not loader.num_workers else None
    )


def _dispatching(options: LoaderOptions, place: bool, streams: bool) -> bool:
    if options.dispatch_batches is None:
        return place and streams
    if options.dispatch_batches and not place:
        raise BadInput(
            "Cannot dispatch batches without placing them.",
            why="dispatch_batches=True broadcasts each batch from the main process's device.",
            fix="leave device_placement on, or pass dispatch_batches=False.",
        )
    return options.dispatch_batches


def batch_size(loader: DataLoader[Any]) -> int | None:
    """Return how many samples a loader's batches have; None where nobody tells."""
    size = loader.batch_size
    if size is None:
        size = getattr(_batch_sampler(loader), "batch_size", None)
    return size


def _batch_sampler(loader: DataLoader[Any]) -> Any:
    """Return what yields lists of indices: users may put it in the sampler's place."""
    return loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler


def _seeded(loader: DataLoader[Any], options: LoaderOptions) -> DataLoader[Any]:
    """Put a sampler whose order is a function of seed and epoch in a random one's place."""
    batches = _batch_sampler(loader)
    sampler = getattr(batches, "sampler", None)
    if not options.use_seedable_sampler or not isinstance(sampler, RandomSampler):
        return loader
    batches.sampler = SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=options.data_seed,
    )
    return loader


def _sharded(
    loader: DataLoader[Any], session: Session, options: LoaderOptions
) -> tuple[DataLoader[Any], torch.Generator | None]:
    """Return this rank's share, and the generator that must be the same on every rank."""
    world = session.world
    if isinstance(loader.dataset, IterableDataset):
        shard = IterableDatasetShard(
            loader.dataset,
            batch_size=loader.batch_size or 1,
            drop_last=loader.drop_last,
            num_processes=world.size,
            process_index=world.rank,
            split_batches=options.split_batches,
            even_batches=options.even_batches,
        )
        own = shard.round_size // world.size
        share = rebuild(loader, dataset=shard, batch_size=own, drop_last=loader.drop_last)
        return share, getattr(loader.dataset, "generator", None)
    batches = _batch_sampler(loader)
    sampler = getattr(batches, "sampler", None)
    generator = None
    if hasattr(sampler, "generator") and not options.use_seedable_sampler:
        generator = _generator(sampler)
    dealt = BatchSamplerShard(
        batches, world.size, world.rank, options.split_batches, options.even_batches
    )
    if isinstance(loader.sampler, BatchSampler):
        return rebuild(loader, sampler=dealt, batch_size=loader.batch_size), generator
    return rebuild(loader, batch_sampler=dealt), generator


def _generator(sampler: Any) -> torch.Generator:
    """Return the sampler's generator, made if there is none: the global one differs by rank."""
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        sampler.generator.manual_seed(seed)
    generator: torch.Generator = sampler.generator
    return generator


def build_feed(
    session: Session,
    loader: Any,
    num_micro: int,
    count: Callable[[tuple[Any, ...]], torch.Tensor | None],
    *,
    keeps_repeats: bool = False,
) -> Feed:
    """Return a prepared loader's steps, without the samples that only fill the last round up.

    A rank that has no sample of its own there keeps its batch, and is told so: it must go through
    the same step as the others. Where a loader's batches keep to a few shapes, such samples are
    masked and not cut off. With `keeps_repeats`, ranks train on them, as HF's do: somebody's own
    code may gather what it computes, and then all ranks' must have one shape.
    """
    world = session.world
    shaper = loader.collate_fn if hasattr(getattr(loader, "collate_fn", None), "hide") else None

    def own(batch: Any, remainder: int) -> tuple[Any, bool]:
        rows = num_rows(batch)
        if rows is None:
            return batch, True
        if shaper is not None and shaper.can_hide(batch):
            if world.size == 1:  # a collator has masked what it added, and there is nothing else
                return batch, True
            _, num_own = num_own_rows(batch, remainder, world.rank, rows)
            cut = shaper.hide(batch, num_own)
        elif keeps_repeats and world.size > 1:
            return batch, True
        else:
            cut, num_own = own_rows(batch, remainder, world.rank, rows)
        return (cut, True) if num_own else (batch, False)

    return Feed(loader, num_micro, count, own)


def count_items(session: Session, model: nn.Module) -> Callable[[tuple[Any, ...]], torch.Tensor]:
    """Return what counts the items of a step's micro-batches over all ranks, on the device."""
    shifted = objective.shifts_labels(model)

    def count(micro: tuple[Any, ...]) -> torch.Tensor:
        own = sum(objective.num_items(batch, shifted=shifted) for batch in micro)
        if not isinstance(own, torch.Tensor):  # filled by a kernel: to copy it would wait
            own = torch.full((), own, device=session.device)
        return session.world.reduce(own, "sum")

    return count


class Recount:
    """The items of a step, as its losses were weighed, where they may not be the loader's.

    How many a step trains on is known when its last micro-batch is made; its losses have been
    shares of the loader's count until then.
    """

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._world, self._device, self._model = session.world, session.device, model
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self._own: torch.Tensor | float = 0.0
        self._whole: torch.Tensor | None = None

    def take(self, own: torch.Tensor | int, whole: torch.Tensor | int) -> None:
        """Count a micro-batch, whose loss is `own` shares of `whole`; infinitely many: none."""
        whole = torch.as_tensor(whole, dtype=torch.float32, device=self._device).clamp(min=1)
        self._own = self._own + own * torch.isfinite(whole)
        self._whole = whole if self._whole is None else torch.minimum(self._whole, whole)

    def settle(self, loss: torch.Tensor) -> torch.Tensor:
        """Make gradients means over what all ranks have counted; return the loss as such a mean."""
        own = torch.as_tensor(self._own, dtype=torch.float32, device=self._device)
        counted = self._world.reduce(own, "sum")
        if self._whole is None:  # a training_step that weighs its loss by itself
            return loss
        factor = torch.where(counted > 0, self._whole / counted.clamp(min=1), 1.0)
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)
        return loss * factor
