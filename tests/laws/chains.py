"""A training that is taken up again and again, each time by others: who saw which sample.

The ranks of a life are lived one after the other in this process. What the first one broadcasts is
kept for the others, so that a loader which reads for all deals as it does among processes.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from anytrain.core.errors import Notice
from anytrain.core.plan import Wish, Wishes
from anytrain.doors.trainer import training
from anytrain.engine.assemble.loaders import LoaderOptions, build_feed, prepare_loader
from anytrain.engine.assemble.session import Session, session
from anytrain.engine.checkpoint.state_schema import check_loader
from anytrain.engine.data.buckets import Bucketed
from anytrain.engine.data.grouped import GroupedByLength, Rebalanced
from anytrain.engine.loop import fit
from anytrain.engine.recording.meter import Meter
from anytrain.engine.step.step import StepOutput
from anytrain.machine.parallel.world import Solo


class Seat(Solo):
    """A rank of a world whose ranks take their turns; the first one's words are kept."""

    def __init__(self, rank: int, size: int, said: list[Any]) -> None:
        super().__init__()
        self.rank, self.size = rank, size  # type: ignore[assignment]  # Solo's are of the class
        self._said, self._heard = said, deque(said)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        if self.rank == source:
            self._said.append(value)
            return value
        return self._heard.popleft()

    def broadcast(self, value: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self.broadcast_object(value.clone(), source)


class Stream(IterableDataset):
    """A shuffled stream whose order is a function of the epoch; workers take turns."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        return order

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        begin, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(self.order()[begin::step])


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class PlacedStream(Stream):
    """A stream that can tell and take its place."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        while self.place < self.size:
            self.place += 1
            yield order[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


STREAMS = {"stream": Stream, "sized": SizedStream, "placed": PlacedStream}


@dataclass(frozen=True)
class Chain:
    """What stays from life to life."""

    seed: int
    size: int
    data: str = "map"
    order: str = "shuffled"
    drop_last: bool = False
    split: bool = False
    dispatch: bool = False
    workers: int = 0
    epochs: float = 2.0
    max_steps: int = -1

    @property
    def counts_short(self) -> bool:
        """Whether an epoch may have more rounds than the data's length tells a Trainer.

        Each of several workers that read a stream has a short last round, which none can foresee.
        """
        return self.data != "map" and self.workers > 1 and self.max_steps < 0

    def loader(self, life: Life) -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": self.workers}
        if self.data != "map":
            stream = STREAMS[self.data](self.size)
            return DataLoader(stream, life.batch_size, drop_last=self.drop_last, **options)
        lengths = [1 + 7 * n % 23 for n in range(self.size)]
        step, data = life.batch_size * life.accumulation, list(range(self.size))
        whole = step * (1 if self.split else life.ranks)
        if self.order == "buckets":
            return DataLoader(
                data,
                batch_sampler=Bucketed(
                    lengths,
                    (8, 16, 24),
                    life.batch_size,
                    batches_per_step=whole // life.batch_size,
                    drop_last=self.drop_last,
                    seed=self.seed,
                ),
                **options,
            )
        if self.order == "rebalanced":
            return DataLoader(
                data,
                batch_sampler=Rebalanced(
                    lengths,
                    step * life.ranks,
                    num_ranks=life.ranks,
                    accumulation=life.accumulation,
                    drop_last=self.drop_last,
                    seed=self.seed,
                ),
                **options,
            )
        sampler = {
            "shuffled": lambda: RandomSampler(data),
            "in order": lambda: SequentialSampler(data),
            "by length": lambda: GroupedByLength(lengths, step, seed=self.seed),
        }[self.order]()
        return DataLoader(
            data, life.batch_size, sampler=sampler, drop_last=self.drop_last, **options
        )


@dataclass(frozen=True)
class Life:
    """What may change from life to life, and after how many steps (or batches) it ends."""

    ranks: int = 1
    batch_size: int = 4
    accumulation: int = 1
    stop: int | None = None


@dataclass
class Seen:
    """What came of a life."""

    rounds: list[tuple[int, list[int], int]] = field(default_factory=list)
    """Each round's epoch, its samples in the order of ranks, and how many fill it up."""
    state: dict[str, Any] = field(default_factory=dict)
    progress: Any = None
    is_over: bool = False

    def join(self, other: Seen) -> None:
        """Put the next rank's batches behind those of the ranks before."""
        for number, (epoch, samples, filled) in enumerate(other.rounds):
            if number == len(self.rounds):
                self.rounds.append((epoch, [], 0))
            own, before, more = self.rounds[number]
            assert own == epoch, "ranks are in different epochs"
            self.rounds[number] = (own, before + samples, more + filled)


Lived = Callable[[Chain, Life, Session, Any], Seen]


def live(chain: Chain, life: Life, lived: Lived, saved: Any) -> Seen:
    """Live a life of so many ranks, from what was saved of the one before."""
    said: list[Any] = []
    whole = Seen()
    for rank in range(life.ranks):
        torch.manual_seed(chain.seed if saved is None else 77)
        own = session(Wishes(device=Wish("cpu", "the test")))
        own.world = Seat(rank, life.ranks, said)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Notice)
            found = lived(chain, life, own, saved)
        if rank == 0:
            whole = replace(found, rounds=[])
        whole.join(found)
    return whole


def prepared(chain: Chain, life: Life, own: Session) -> Any:
    options = LoaderOptions(
        split_batches=chain.split, dispatch_batches=chain.dispatch, rng_types=("generator",)
    )
    return prepare_loader(chain.loader(life), own, options, place=True)


def own_loop(chain: Chain, life: Life, own: Session, saved: Any) -> Seen:
    """Walk a prepared loader as a loop of the user's own does."""
    seen, loader = Seen(), prepared(chain, life, own)
    if saved is not None:
        restore(loader, saved, own)
    number = 0
    while loader.iteration < chain.epochs:
        for batch in loader:
            rows, filled = batch.tolist(), 0
            if loader.end_of_dataloader and loader.remainder > 0 and life.ranks > 1:
                begin = own.world.rank * len(rows)
                filled = min(len(rows), max(0, begin + len(rows) - loader.remainder))
            seen.rounds.append((loader.iteration, rows[: len(rows) - filled], filled))
            number += 1
            if number == life.stop:
                seen.state = state_of(loader, own)
                return seen
    seen.is_over = True
    return seen


def state_of(loader: Any, own: Session) -> dict[str, Any]:
    return {
        "loader": loader.state_dict(),
        "rng": torch.get_rng_state(),
        "ranks": own.world.size,
    }


def restore(loader: Any, saved: dict[str, Any], own: Session) -> None:
    check_loader(saved["loader"], loader.walk.generator, loader.layout_names, loader.num_samples())
    loader.load_state_dict(saved["loader"])
    if saved["ranks"] == own.world.size:
        torch.set_rng_state(saved["rng"])


class Ends:
    """A job that takes down where it stands, and stops the loop after a step."""

    def __init__(self, loader: Any, progress: Any, last: int | None, own: Session) -> None:
        self.loader, self.progress, self.last, self.own = loader, progress, last, own
        self.state: dict[str, Any] = {}

    def tell(self, kind: str) -> frozenset[Any]:
        if kind != "step_end" or self.progress.step != self.last:
            return frozenset()
        self.state = state_of(self.loader, self.own)
        return frozenset({"stop"})

    def settle(self) -> None: ...
    def log(self) -> None: ...
    def between(self) -> None: ...


def trainer(chain: Chain, life: Life, own: Session, saved: Any) -> Seen:
    """Walk as a Trainer does: as long as its arguments say, in steps."""
    seen, loader = Seen(), prepared(chain, life, own)
    args: Any = SimpleNamespace(
        gradient_accumulation_steps=life.accumulation,
        max_steps=chain.max_steps,
        num_train_epochs=chain.epochs,
        dataloader_drop_last=chain.drop_last,
    )
    samples = life.batch_size * (1 if chain.split else life.ranks)
    num_batches = None if loader.num_samples() is None else len(loader)
    where = place = None
    if saved is not None:
        where, place = saved["progress"], loader.place_of(saved["loader"])
        restore(loader, saved, own)
    progress = training.plan(args, num_batches, samples, where, place)
    feed = build_feed(own, loader, life.accumulation, lambda micro: None)

    def step(batch: Any) -> StepOutput:
        for number, micro in enumerate(batch.micro):
            spare = batch.is_last_spare and number == len(batch.micro) - 1
            seen.rounds.append((progress.epoch, [] if spare else micro.tolist(), 0))
        return StepOutput(torch.ones(()), None, 0.1, torch.zeros(()))

    first = progress.step
    job = Ends(loader, progress, None if life.stop is None else first + life.stop, own)
    before = progress.epochs
    fit(job, feed, step, Meter(torch.device("cpu")), progress)
    assert progress.epochs >= before
    seen.progress = progress
    if job.state:
        seen.state = {**job.state, "progress": progress_at(progress, job)}
    seen.is_over = progress.step >= progress.max_steps or progress.epoch >= progress.num_epochs
    return seen


def progress_at(progress: Any, job: Ends) -> dict[str, Any]:
    """Return the progress as a checkpoint after the last step holds it: before the epoch ends."""
    state = progress.state_dict()
    if job.state["loader"]["iteration"] < progress.epoch:  # the step was its epoch's last
        state |= {"epoch": progress.epoch - 1, "batch": progress.batches_per_epoch}
    return state


def check_epochs(chain: Chain, lives: list[tuple[Life, Seen]]) -> None:
    """Each sample comes once an epoch, but for what fills the last round, or is dropped of it."""
    came: dict[int, Counter[int]] = {}
    for _, seen in lives:
        for epoch, samples, _ in seen.rounds:
            came.setdefault(epoch, Counter()).update(samples)
    whole = int(chain.epochs) if chain.max_steps < 0 else max(came)
    for epoch in range(whole):
        filled, left_out = _surplus(chain, [life for life, _ in lives])
        twice = {n: times for n, times in came[epoch].items() if times > 1}
        more = sum(twice.values()) - len(twice)
        assert more <= filled, f"in epoch {epoch} came twice: {twice}"
        if epoch == whole - 1 and chain.counts_short and lives[-1][1].progress is not None:
            last = lives[-1][0]
            left_out += last.batch_size * last.ranks * whole * chain.workers
        missing = chain.size - len(came[epoch])
        assert missing <= left_out, f"in epoch {epoch} {missing} never came"
    part = chain.epochs - whole
    if part and chain.max_steps < 0:
        assert len(came[whole]) >= math.floor(part * chain.size) - left_out


def _surplus(chain: Chain, lives: list[Life]) -> tuple[int, int]:
    """Return how many samples may be repeated unmarked, and how many left out.

    A loader marks what fills its last round up. It cannot where each of several workers has a last
    round of a stream, nor where samples are cut in parts of a step that has fewer of them.
    """
    each = max(life.batch_size * (1 if chain.split else life.ranks) for life in lives)
    ends = chain.workers if chain.workers and chain.data != "map" else 1
    filled = (each - 1) * ends if ends > 1 else 0
    if chain.order == "rebalanced" and chain.data == "map":
        filled = max(life.ranks * life.accumulation for life in lives) - 1
        each *= max(life.accumulation for life in lives)
    return filled, (each - 1) * ends if chain.drop_last else 0
