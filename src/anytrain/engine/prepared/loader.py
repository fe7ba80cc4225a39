"""A data loader that yields this rank's batches, on the device, and knows its last one.

It reads ahead, so that the loop learns of the end before it is there. The position it reports is
that of the batch handed out, not of the ones read ahead.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from anytrain.core.notices import give_notice
from anytrain.engine.data.compiled_shapes import Watched
from anytrain.engine.data.dispatch import Rounds, dispatch
from anytrain.engine.data.grouped import Rebalanced
from anytrain.engine.data.position import Position, RestOfBatches
from anytrain.engine.data.prefetch import Prefetcher, ReadBatch, RecentBatches
from anytrain.engine.data.seeded import SeededCollate, SeededDataset, load
from anytrain.engine.data.shard import BatchSamplerShard
from anytrain.engine.data.workers import (
    AutoWorkers,
    Changes,
    MindedWorkers,
    sent_home,
    with_workers,
)
from anytrain.engine.prepared import loading_errors
from anytrain.engine.prepared.rebuild import rebuild, rest_of_stream, skipping
from anytrain.engine.prepared.rounds import Dealt, PlaceInRound
from anytrain.engine.prepared.walk import Walk


class PreparedLoader(DataLoader[Any]):
    """A prepared data loader; everything it does not define is the loader's below.

    Its position is a place in the order of the epoch's samples, so that an epoch can be taken up
    by another number of ranks, and in batches of another size.
    """

    base_dataloader: DataLoader[Any]
    walk: Walk
    end_of_dataloader: bool
    remainder: int
    iteration: int
    _drop_last: bool
    _position: Position | None
    """After the batch that was handed out last; None before the first."""
    _reading: tuple[int, int]
    _turned: int | None
    _at_start: dict[str, Any] | None
    """The generators' states when this epoch's order was drawn."""
    _resume: dict[str, Any] | None
    """A restored position, until the walk that takes it up begins."""
    _seed: int | None
    """What the seeds of samples are made from; None where none are."""
    _stream: dict[str, Any] | None
    """Where the stream stood after the batch that was handed out last."""
    _dealer: Any
    """The sampler of the rest of an epoch that is taken up in its middle; None in a whole one."""
    _dispatched: Any
    _skip: int | None
    """How many batches the next walk passes over."""

    def __init__(
        self, base: DataLoader[Any], walk: Walk, drop_last: bool, seed: int | None = None
    ) -> None:
        # DataLoader.__init__ is not called: `base` is the loader, this one only walks it.
        self.__dict__.update(
            base_dataloader=base,
            walk=walk,
            end_of_dataloader=False,
            remainder=-1,
            iteration=0,
            _drop_last=drop_last,
            _position=None,
            _reading=(0, 0),
            _turned=None,
            _at_start=None,
            _resume=None,
            _seed=seed,
            _stream=None,
            _dealer=None,
            _dispatched=None,
            _skip=None,
        )

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":  # not yet set: a copy or an unpickled one is being made
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name in self.__dict__ else self.base_dataloader, name, value)

    @property
    def dataset(self) -> Any:  # type: ignore[override]  # torch has attributes
        """The dataset as it was given."""
        found = self.base_dataloader.dataset
        return found.dataset if isinstance(found, SeededDataset) else found

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]  # torch has attributes
        """What deals the batches."""
        seeded = self.walk.seeded
        return self.base_dataloader.batch_sampler if seeded is None else seeded.batch_sampler

    @property
    def collate_fn(self) -> Any:  # type: ignore[override]  # torch has attributes
        """The collator as it was given."""
        found = self.base_dataloader.collate_fn
        return found.collate if isinstance(found, SeededCollate) else found

    @property
    def given(self) -> DataLoader[Any]:
        """The loader as it was given, to be prepared by another run."""
        return self.base_dataloader if self.walk.given is None else self.walk.given

    @property
    def device(self) -> torch.device | None:
        """Where batches arrive; None where they are left on the host."""
        return self.walk.placement.device if self.walk.placement else None

    def __len__(self) -> int:
        length = len(self.base_dataloader)
        each = self._dealt.per_batch if self.walk.dispatching else 1
        return length // each if self._drop_last else -(-length // each)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator
        return self.walk_from(None)

    def walk_from(self, skip: int | None) -> Generator[Any]:
        """Yield the epoch's batches after the first `skip`; None takes a restored position."""
        walk, resume, own = self.walk, self._resume, self.__dict__
        if skip is None:
            skip, self._skip = self._skip, None
        position = self._beginning(skip, resume)
        self._begin(position, resume)
        walk.cursor.enter(self)
        ledger, batches = walk.ledger, None
        entered = ledger.enter_walk(walk.cursor.updates)
        try:
            with ledger.span("data"):
                batches = self._after(position, resume)
            for current in batches:
                position = Position(position.samples + position.round_size, position.round_size)
                reached = batches.reached
                if batches.is_last:
                    self._finish()
                    position = position.at_end(self.num_samples())
                    reached = walk.stream_state()  # read to its end, it may stand at its beginning
                own["_position"], own["_stream"] = position, reached
                yield current
                if walk.cursor.end_step is not None:
                    walk.cursor.end_step()
                stops = walk.cursor.stops
                if stops is not None and perf_counter() >= stops.next_look:
                    walk.cursor.between(self)
            self.iteration += 1
            self._rewind()
        except GeneratorExit:  # left early, by a break: the next walk begins at the start
            newest = self._position.rounds - 1 if self._position else 0
            walk.cursor.left = (newest, self.samples_of(newest))
            self._rewind()
            raise
        finally:
            if batches is not None:
                batches.close()
            walk.cursor.leave(self)
            ledger.leave_walk(entered, walk.cursor.updates)

    def rewind(self) -> None:
        """Forget a restored position: the next walk begins at its epoch's start."""
        self._resume = None
        self._rewind()

    def skip_next(self, num_batches: int) -> None:
        """Begin the next walk after so many batches, where the order is a function of the epoch."""
        self._skip = num_batches or None

    def _rewind(self) -> None:
        self._position = self._at_start = self._stream = None

    def _beginning(self, skip: int | None, resume: dict[str, Any] | None) -> Position:
        """Return where the next walk begins: at the restored position, or so many batches on."""
        size = self._dealt.round_size
        if resume is None or (skip is not None and resume.get("round_size", size) == size):
            return Position((skip or 0) * size, size)
        position = self._dealt.position_in(resume)
        if skip is not None:  # whoever counts batches counts the saved run's
            give_notice(
                f"The checkpoint's batches had another size, so skipping {skip} batches may lead "
                "to another place than the checkpoint's: going on at the checkpoint's, after "
                f"{position.samples} samples of the epoch.",
                stacklevel=4,
            )
        return position

    def _begin(self, position: Position, resume: dict[str, Any] | None) -> None:
        """Start an epoch: share the order, and note the generators it is drawn from."""
        self.set_epoch(self.iteration)
        self._resume = None
        self._position = position
        self._dealer = None
        self.end_of_dataloader = False
        self._reading, self._turned = self._dealt.own_reading, None
        if resume is not None and resume.get("reading") is not None:
            self._reading, self._turned = tuple(resume["reading"]), resume.get("turned")
        self.remainder = self._expected_remainder(position.samples)
        walk = self.walk
        if resume is not None:
            self._at_start = resume["at_start"]
        else:
            walk.share_generators()
            self._at_start = walk.generators()
        if walk.seeded is not None:
            walk.seeded.begin(self._seed or 0, self.iteration)

    def _after(self, position: Position, resume: dict[str, Any] | None) -> Prefetcher:
        """Return the epoch's batches after a position, in the order a checkpoint names.

        Making the iterator draws from torch's generator, so after a resume the generators are
        set to the epoch's start first, and back to what the checkpoint restored last.
        """
        if not position.samples and resume is None:
            return self._ahead(self._whole())
        walk = self.walk
        place = None if resume is None or walk.stream is None else resume["stream"]
        if position.ended:
            if place is not None:
                walk.stream.load_state_dict(place)
            return self._ahead(iter(()))
        with walk.drawing_again(None if resume is None else resume["at_start"], self.get_sampler):
            base, drop = self._rest(position.samples, place)
            batches = self._batches(base)
            for _ in range(drop):
                next(batches, None)
            ahead = self._ahead(batches, position.rounds)
            ahead.fill()  # draws the permutation, and what the walk before had drawn ahead
        return ahead

    def _ahead(self, batches: Iterator[Any], first: int = 0) -> Prefetcher:
        walk = self.walk
        waits = None if walk.workers is None else walk.workers.waits
        reached = None if walk.stream is None else self._reached
        given = batches, walk.placement, walk.ledger, reached, waits
        ahead = Prefetcher(*given) if walk.shapes is None else Watched(walk.shapes, *given)
        ahead.trim = walk.trim
        if walk.seeded is not None and self._dealer is None:
            ahead.explain = partial(self._explained, first)
        elif walk.seeded is None:
            ahead.explain = loading_errors.told_column
        if walk.seeded is None and ahead.runs_behind:
            ahead.kept = walk.kept = walk.kept or RecentBatches()
            ahead.kept.begin(self.iteration, first)
        return ahead

    def _explained(self, first: int, error: Exception, batches: Iterator[Any]) -> Exception:
        """Return the error of loading that names the samples; `first` is the walk's first batch."""
        dataset, seeded = self.base_dataloader.dataset, self.walk.seeded
        assert seeded is not None
        newest = seeded.newest - first
        return loading_errors.told(
            error, dataset, batches, lambda number: self.samples_of(first + number), newest
        )

    def _whole(self) -> Iterator[Any]:
        """Return a whole epoch's batches, from workers where they were waited for too long."""
        base, auto = self.base_dataloader, self.walk.workers
        number = 0 if auto is None else auto.choose(base, self.batch_sampler)
        if auto is None or not number:
            return self._batches(base)
        options = with_workers(base, number)
        return self._from_workers(rebuild(base, batch_sampler=base.batch_sampler, **options), auto)

    def _from_workers(self, base: DataLoader[Any], auto: AutoWorkers) -> Iterator[Any]:
        """Yield what workers load; should they fail, load the rest of the epoch here.

        So too where something was changed that loads: it is as it was in the workers' copies.
        """
        done, watch = 0, Changes(base)
        try:
            for batch in self._batches(base):
                if (changed := watch.changed()) is not None:
                    auto.give_up(f"{changed} was changed in the middle of an epoch")
                    break
                done += self._dealt.round_size
                yield batch
            else:
                return
        except Exception as error:  # noqa: BLE001  nobody asked for workers: their errors are ours
            said = str(error).strip().splitlines()
            auto.give_up(f"workers failed: {said[0] if said else type(error).__name__}")
        with self.walk.drawing_again(self._at_start, self.get_sampler):
            rest = self._batches(self._rest(done, None)[0])
            first = list(islice(rest, 1))  # draws the permutation
        yield from first
        yield from rest

    def _rest(self, done: int, place: Any) -> tuple[DataLoader[Any], int]:
        """Return a loader of what follows so many samples, and how many batches to drop of it."""
        base = self.base_dataloader
        if isinstance(self.dataset, IterableDataset):
            return self._rest_of_stream(done, place)
        dealt, seeded = self._dealt.source(), self.walk.seeded
        whole, part = divmod(done, self._dealt.base_size)
        if not part and not isinstance(self._dealt.undealt(), Rebalanced):
            rest = skipping(base, whole)  # as if this epoch had begun with batches of this size
            return (base, done // self._dealt.round_size) if rest is None else (rest, 0)
        if isinstance(dealt, BatchSamplerShard):
            self._dealer = dealt.after(done)
        else:
            self._dealer = RestOfBatches(dealt, done, 0)
        if self.batch_sampler is None:  # a batch sampler in the sampler's place
            return rebuild(base, sampler=self._dealer, batch_size=None), 0
        batches = self._dealer
        if seeded is not None:
            batches = seeded.of(batches, Position(done, self._dealt.base_size).rounds)
        return rebuild(base, batch_sampler=batches), 0

    def _rest_of_stream(self, done: int, place: Any) -> tuple[DataLoader[Any], int]:
        base, walk = self.base_dataloader, self.walk
        if place is not None:
            walk.stream.load_state_dict(place)
            return base, 0
        walk.tell_read_again(done, "samples" if base.batch_size else "batches")
        alike = done % self._dealt.round_size == 0 and self._reading == self._dealt.own_reading
        if alike and self._turned is None:
            return base, done // self._dealt.round_size
        if self._reading[1] and self._turned is None:
            self._turned = done  # from here on samples are counted one by one
        rest = rest_of_stream(base, done, self._reading, self._turned or 0)
        self._dealer = rest.dataset
        return rest, 0

    def _batches(self, base: DataLoader[Any]) -> Iterator[Any]:
        walk, walked = self.walk, MindedWorkers.of
        if not walk.dispatching or walk.world.size == 1:  # alone, a batch stays as it is
            return sent_home(walked(base))
        return dispatch(
            sent_home(walked(base)) if walk.world.rank == 0 else iter(()),
            Rounds(walk.world, walk.device, walk.split_batches, self._drop_last, walk.slice_fn),
            report=partial(setattr, self, "remainder"),
            place=walk.stream_state,
            reach=partial(setattr, self, "_dispatched"),
        )

    def _reached(self) -> Any:
        """Return where the stream stood after the batch that was read last."""
        if self.walk.dispatching and self.walk.world.size > 1:
            return self._dispatched
        return self.walk.stream_state()

    def _finish(self) -> None:
        self.end_of_dataloader = True
        exact = getattr(self._dealt.source(), "remainder", None)
        if exact is not None:
            self.remainder = exact

    @property
    def num_unrepeated(self) -> int:
        """How many samples of the last round are no repeats; 0 or less where none is repeated."""
        fills = getattr(self.collate_fn, "rows", None) is not None
        return self.remainder if self.walk.world.size > 1 or fills else -1

    @property
    def num_last(self) -> int:
        """How many rows of the last round count; 0 or less where all do, or nobody knows.

        Alone, none is a repeat: a loss that was repeated for a whole batch is cut to as many. But
        only torch's own sampler is known to have the short batch last.
        """
        source: Any = self.base_dataloader.batch_sampler
        while getattr(source, "batch_sampler", None) is not None:
            source = source.batch_sampler
        knows = self.walk.world.size > 1 or type(source) is BatchSampler
        return self.remainder if knows else -1

    def end_restored_epoch(self) -> None:
        """Where a restored position is at the end of its epoch, begin the next walk after it."""
        if self._resume is None:
            return
        is_stream = isinstance(self.dataset, IterableDataset)  # its length is not to be relied on
        if self._dealt.position_in(self._resume).ended or (
            not is_stream and self.place_of(self._resume).left == 0
        ):
            self.rewind()
            self.iteration += 1

    def step_back(self, num_batches: int) -> None:
        """Let a restored position be so many of the saved run's batches earlier."""
        resume = self._resume
        if resume is not None and "samples" in resume:
            samples = max(0, resume["samples"] - num_batches * resume["round_size"])
            # A stream that knows its place knows no earlier one: it is read again up to it.
            self._resume = {**resume, "samples": samples, "ended": False, "stream": None}

    @property
    def _dealt(self) -> Dealt:
        return Dealt(self)  # kept, it would keep the loader from being freed at once

    def num_samples(self) -> int | None:
        return self._dealt.num_samples()

    def place_of(self, state: Mapping[str, Any]) -> PlaceInRound:
        return self._dealt.place_of(state, drop_last=self._drop_last)

    @property
    def total_batch_size(self) -> int:
        """The number of samples of one batch over all ranks."""
        return self._dealt.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """The number of samples over all ranks."""
        return self._dealt.total_dataset_length

    def _expected_remainder(self, done: int) -> int:
        if self._drop_last or self._reading[1] > 1:
            return -1  # each of several workers that read a stream has a last round of its own
        try:
            return (self.total_dataset_length - done) % self.total_batch_size
        except (TypeError, AttributeError, NotImplementedError, ZeroDivisionError):
            return -1  # a stream that does not know its length

    def samples_of(self, number: int) -> list[Any] | None:
        """Return which samples made this rank's batch of that number; None where nobody knows."""
        return None if self.walk.seeded is None else self.walk.seeded.dealt(number)

    def load_again(self, samples: list[Any]) -> Any:
        """Return a batch of this epoch once more, with whatever was drawn while loading it."""
        place, batch = self.walk.placement, self._loaded(samples)
        return batch if place is None else place(batch)

    def read_before(self) -> list[ReadBatch]:
        """Return the last batches, the oldest first, also of earlier epochs.

        To read one again takes no device.
        """
        seeded, again = self.walk.seeded, self._loaded
        if seeded is None:
            return list(self.walk.kept or ())
        return [
            ReadBatch(epoch, number, samples, partial(again, samples, key))
            for epoch, number, samples, key in seeded.known()
        ]

    def _loaded(self, samples: list[Any], key: int | None = None) -> Any:
        base, seeded = self.base_dataloader, self.walk.seeded
        assert seeded is not None
        return load(base.dataset, base.collate_fn, seeded.draw(samples, key))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next, in whatever takes one."""
        self.iteration = epoch
        seen: set[int] = set()
        for part in (self.batch_sampler, self.sampler, self.dataset):
            while part is not None and id(part) not in seen:
                seen.add(id(part))
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
                part = getattr(part, "batch_sampler", None) or getattr(part, "sampler", None)

    def get_sampler(self) -> Any:
        """Return the sampler of single indices."""
        source = self._dealt.source()
        while getattr(source, "batch_sampler", None) is not None:
            source = source.batch_sampler
        return getattr(source, "sampler", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, the samples handed out, the epoch's generators."""
        if self._resume is not None:  # restored, and not walked since
            return {**self._resume, "iteration": self.iteration}
        position = self._position or Position(0, self._dealt.round_size)
        return {
            "iteration": self.iteration,
            "samples": position.samples,
            "ended": position.ended,
            "round_size": position.round_size,
            "reading": self._reading,
            "turned": self._turned,
            "at_start": self._at_start,
            "generator": self.walk.generator_state(),
            "seed": self._seed,
            "stream": self._stream,
            "layout": self._dealt.layout(self.iteration),
        }

    @property
    def layout_names(self) -> Sequence[str]:
        """Which facts of a layout the order follows from."""
        held = self._dealt.laid_out()
        return () if held is None else tuple(held.layout)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, at the next walk, after the samples that `state` counts."""
        self.iteration = state["iteration"]
        self._seed = state["seed"]
        laid_out, layout = self._dealt.laid_out(), state.get("layout")
        if laid_out is not None and layout is not None:
            laid_out.keep_layout(layout, self.iteration)
        # A position at the very end counts too: the next walk then only ends that epoch, so that
        # what the loop does after an epoch is done once.
        self._resume = state if state["at_start"] is not None else None
        if state["generator"] is not None:
            self.walk.take_generator(state["generator"], self.get_sampler())

    def __reduce__(self) -> tuple[Any, ...]:
        return PreparedLoader, (self.base_dataloader, self.walk, self._drop_last, self._seed)
