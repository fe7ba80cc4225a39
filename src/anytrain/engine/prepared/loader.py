"""A data loader that yields this rank's batches, on the device, and knows its last one.

It reads ahead, so that the loop learns of the end before it is there. The position it reports is
that of the batch handed out, not of the ones read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from anytrain.engine.data.ahead import Ahead, Placement
from anytrain.engine.data.alike import Watch
from anytrain.engine.data.dispatch import dispatch
from anytrain.engine.data.graphs import Watched
from anytrain.engine.data.seeded import SeededCollate, SeededDataset, Tickets, load
from anytrain.engine.data.shard import BatchSamplerShard
from anytrain.engine.data.workers import AutoWorkers, MindedWorkers, sent_home, with_workers
from anytrain.engine.prepared.rebuild import rebuild, skipping
from anytrain.engine.prepared.walk import Walk

__all__ = ["Placement", "PreparedLoader", "Walk"]


class PreparedLoader(DataLoader[Any]):
    """A prepared data loader; everything it does not define is the loader's below.

    Its position is counted in batches of the global order (`_done`), so that an epoch can be
    taken up by another number of ranks.
    """

    base_dataloader: DataLoader[Any]
    walk: Walk
    end_of_dataloader: bool
    remainder: int
    iteration: int
    _drop_last: bool
    _done: int
    _at_start: dict[str, Any] | None
    _resume: dict[str, Any] | None
    _seed: int | None
    _stream: dict[str, Any] | None
    _dealer: Any
    _skip: int | None

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
            _done=0,
            _at_start=None,
            _resume=None,
            _seed=seed,
            _stream=None,
            _dealer=None,
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
        tickets = self.walk.tickets
        return self.base_dataloader.batch_sampler if tickets is None else tickets.batch_sampler

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
        each = self._per_batch if self.walk.dispatching else 1
        return length // each if self._drop_last else -(-length // each)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator
        return self.walk_from(None)

    def walk_from(self, skip: int | None) -> Generator[Any]:
        """Yield the epoch's batches after the first `skip`; None takes a restored position."""
        walk, resume, own = self.walk, self._resume, self.__dict__
        each = self._per_batch
        if skip is None:
            skip, self._skip = self._skip, None
        done = skip * each if skip is not None else resume["done"] if resume else 0
        self._begin(resume)
        walk.cursor.enter(self)
        ledger, batches = walk.ledger, None
        entered = ledger.enter_walk(walk.cursor.updates)
        try:
            with ledger.span("data"):
                batches = self._after(done, resume)
            for current in batches:
                if batches.is_last:
                    self._finish()
                own["_done"] = done = done + each
                own["_stream"] = batches.reached
                yield current
                if walk.cursor.end_step is not None:
                    walk.cursor.end_step()
                if walk.cursor.stops is not None:
                    walk.cursor.between(self)
            self.iteration += 1
            self._rewind()
        except GeneratorExit:  # left early, by a break: the next walk begins at the start
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
        self._done = 0
        self._at_start = None
        self._stream = None

    def _begin(self, resume: dict[str, Any] | None) -> None:
        """Start an epoch: share the order, and note the generators it is drawn from."""
        self.set_epoch(self.iteration)
        self._resume = None
        self._done = 0
        self._dealer = None
        self.end_of_dataloader = False
        self.remainder = self._expected_remainder()
        walk = self.walk
        if resume is not None:
            self._at_start = resume["at_start"]
        else:
            walk.share_generators()
            self._at_start = walk.generators()
        if walk.tickets is not None:
            walk.tickets.begin(self._seed or 0, self.iteration)

    def _after(self, done: int, resume: dict[str, Any] | None) -> Ahead:
        """Return the epoch's batches less the first ones, in the order a checkpoint names.

        Making the iterator draws from torch's generator, so after a resume the generators are
        set to the epoch's start first, and back to what the checkpoint restored last.
        """
        if not done and resume is None:
            return self._ahead(self._whole())
        walk = self.walk
        with walk.drawing_again(None if resume is None else resume["at_start"], self.get_sampler):
            base, drop = self._rest(done, resume)
            batches = self._batches(base)
            for _ in range(drop):
                next(batches, None)
            ahead = self._ahead(batches)
            ahead.fill()  # draws the permutation, and what the walk before had drawn ahead
        return ahead

    def _ahead(self, batches: Iterator[Any]) -> Ahead:
        walk = self.walk
        waits = None if walk.workers is None else walk.workers.waits
        reached = None if walk.stream is None else walk.stream_state
        if walk.shapes is not None:
            return Watched(walk.shapes, batches, walk.placement, walk.ledger, reached, waits)
        return Ahead(batches, walk.placement, walk.ledger, reached, waits)

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
        done, watch = 0, Watch(base)
        try:
            for batch in self._batches(base, MindedWorkers):
                if (changed := watch.changed()) is not None:
                    auto.give_up(f"{changed} was changed in the middle of an epoch")
                    break
                done += self._per_batch
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

    def _rest(self, done: int, resume: dict[str, Any] | None) -> tuple[DataLoader[Any], int]:
        """Return a loader of what is left, and how many batches of it must be read and dropped."""
        each, base = self._per_batch, self.base_dataloader
        if isinstance(self.dataset, IterableDataset):
            return base, self.walk.catch_up(done // each, resume and resume["stream"])
        dealt = self._source()
        if isinstance(dealt, BatchSamplerShard) and done % each:
            # Another number of ranks began this epoch: skip first, then deal.
            self._dealer = dealt.after(done)
            if self.batch_sampler is None:  # a batch sampler in the sampler's place
                return rebuild(base, sampler=self._dealer, batch_size=None), 0
            return rebuild(base, batch_sampler=_ticketed(self._dealer, self.walk.tickets)), 0
        local = done // each if isinstance(dealt, BatchSamplerShard) else done
        rest = skipping(base, local)
        return (base, done // each) if rest is None else (rest, 0)

    def _batches(
        self, base: DataLoader[Any], walked: Callable[[DataLoader[Any]], Iterator[Any]] = iter
    ) -> Iterator[Any]:
        walk = self.walk
        if not walk.dispatching or walk.world.size == 1:  # alone, a batch stays as it is
            return sent_home(walked(base))
        return dispatch(
            sent_home(walked(base)) if walk.world.rank == 0 else iter(()),
            walk.world,
            walk.device,
            split_batches=walk.split_batches,
            drop_last=self._drop_last,
            slice_fn=walk.slice_fn,
            report=self._note_remainder,
        )

    @property
    def _per_batch(self) -> int:
        """How many batches of the global order make one that is handed out."""
        return 1 if self.walk.split_batches else self.walk.world.size

    def _finish(self) -> None:
        self.end_of_dataloader = True
        exact = getattr(self._source(), "remainder", None)
        if exact is not None:
            self.remainder = exact

    def _source(self) -> Any:
        """What knows how the samples were dealt."""
        if isinstance(self.dataset, IterableDataset):
            return self.dataset
        if self._dealer is not None:
            return self._dealer
        return self.batch_sampler if self.batch_sampler is not None else self.sampler

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
        if self._resume is None or isinstance(self.dataset, IterableDataset):
            return  # the length of a stream is not to be relied on
        try:
            length = len(self) * self._per_batch
        except (TypeError, NotImplementedError):
            return  # a batch sampler that does not know its length
        if self._resume["done"] >= length:
            self.rewind()
            self.iteration += 1

    def rescale(self, saved_size: int, size: int, *, at_end: bool) -> None:
        """Count a restored position in batches of another size; a part of one is not done."""
        if self._resume is not None:
            samples = self._resume["done"] * saved_size
            done = -(-samples // size) if at_end else samples // size
            self._resume = {**self._resume, "done": done}

    def _note_remainder(self, remainder: int) -> None:
        self.remainder = remainder

    def _expected_remainder(self) -> int:
        if self._drop_last:
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except (TypeError, AttributeError, NotImplementedError, ZeroDivisionError):
            return -1  # a stream that does not know its length

    @property
    def total_batch_size(self) -> int:
        """The number of samples of one batch over all ranks."""
        source: Any = self._source()
        if source is None or not hasattr(source, "batch_size"):
            source = self.base_dataloader
        size = int(source.batch_size)
        if self.walk.dispatching:
            return size if self.walk.split_batches else size * self.walk.world.size
        if getattr(source, "split_batches", False):
            return size
        return size * int(_innermost(source, "num_processes", 1))

    @property
    def total_dataset_length(self) -> int:
        """The number of samples over all ranks."""
        dataset: Any = self.dataset
        return int(getattr(dataset, "total_dataset_length", None) or len(dataset))

    def samples_of(self, number: int) -> list[Any] | None:
        """Return which samples made this rank's batch of that number; None where nobody knows."""
        return None if self.walk.tickets is None else self.walk.tickets.dealt(number)

    def load_again(self, samples: list[Any]) -> Any:
        """Return a batch of this epoch once more, with whatever was drawn while loading it."""
        base, tickets, place = self.base_dataloader, self.walk.tickets, self.walk.placement
        assert tickets is not None
        batch = load(base.dataset, base.collate_fn, tickets.draw(samples))
        return batch if place is None else place(batch)

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
        source = self._source()
        while getattr(source, "batch_sampler", None) is not None:
            source = source.batch_sampler
        return getattr(source, "sampler", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, the batches handed out, the epoch's generators."""
        return {
            "iteration": self.iteration,
            "done": self._done,
            "at_start": self._at_start,
            "generator": self.walk.generator_state(),
            "seed": self._seed,
            "stream": self._stream,
            "layout": None if (held := self._laid_out()) is None else held.order_layout(),
        }

    def _laid_out(self) -> Any:
        """Return the sampler whose order follows from a layout as well; None where none does."""
        source = self._source()
        while source is not None and not hasattr(source, "order_layout"):
            source = getattr(source, "batch_sampler", None)
        return source

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, at the next walk, after the batches that `state` counts."""
        self.iteration = state["iteration"]
        self._seed = state["seed"]
        laid_out, layout = self._laid_out(), state.get("layout")
        if laid_out is not None and layout is not None:
            laid_out.keep_layout(layout, self.iteration)
        # A position at the very end counts too: the next walk then only ends that epoch, so that
        # what the loop does after an epoch is done once.
        self._resume = state if state["at_start"] is not None else None
        if state["generator"] is not None:
            self.walk.take_generator(state["generator"], self.get_sampler())

    def __reduce__(self) -> tuple[Any, ...]:
        return PreparedLoader, (self.base_dataloader, self.walk, self._drop_last, self._seed)


def _ticketed(batches: Any, tickets: Tickets | None) -> Any:
    return batches if tickets is None else tickets.of(batches)


def _innermost(source: Any, name: str, default: Any) -> Any:
    while source is not None:
        if hasattr(source, name):
            return getattr(source, name)
        source = getattr(source, "batch_sampler", None)
    return default
