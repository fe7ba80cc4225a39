"""Where an epoch stands, whoever goes on with it: a place in the order of its samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler


@dataclass(frozen=True, slots=True)
class Position:
    """The first `samples` of an epoch's order are done; the rest is dealt in rounds.

    The order is that of the samples themselves, as the sampler or the stream gives them: all ranks
    share it, and it is the same whatever their number, the batch size and the accumulation. So an
    epoch that is taken up with others of these is dealt anew from here, and ends with each sample
    once. A round is one batch for each rank. It is done when it is handed out; samples that fill
    the last round up are no part of the order, and are not counted.

    A batch sampler that names no batch size has batches that nobody can cut otherwise: each of
    them counts as one sample.

    >>> Position(20, round_size=8).rounds_left(50), Position(48, round_size=8).rounds_left(50)
    (4, 1)
    """

    samples: int
    round_size: int
    ended: bool = False
    """Whether the epoch is over, also where `drop_last` has left samples out."""

    def at_end(self, total: int | None) -> Position:
        """Return the place after the last round, which may have been short."""
        return replace(self, samples=self.samples if total is None else total, ended=True)

    @property
    def rounds(self) -> int:
        """How many rounds of this size the samples that are done would make."""
        return -(-self.samples // self.round_size)

    def rounds_left(self, total: int | None, *, drop_last: bool = False) -> int | None:
        """Return how many rounds follow, a short last one among them; None where nobody knows."""
        if self.ended:
            return 0
        if total is None:
            return None
        left = max(0, total - self.samples)
        return left // self.round_size if drop_last else -(-left // self.round_size)


class LaidOut:
    """A sampler whose order follows from its epoch and a layout, such as the size of a step.

    An epoch goes on in the layout that it began with, whatever this run's own is.
    """

    layout: Mapping[str, Any]
    epoch = 0
    _kept: tuple[int, Mapping[str, Any]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def keep_layout(self, layout: Mapping[str, Any], epoch: int) -> None:
        """Let an epoch go on in the order it began with, whatever has changed since.

        A layout of another kind of order says nothing of this one.
        """
        if layout.keys() - {"cut"} == self.layout.keys() - {"cut"}:
            self._kept = (epoch, layout)

    def order_layout(self, epoch: int | None = None) -> Mapping[str, Any]:
        """Return what, with the epoch, decides its order; None is the epoch that comes next."""
        kept, epoch = self._kept, self.epoch if epoch is None else epoch
        return kept[1] if kept is not None and kept[0] == epoch else self.layout


class RestOfBatches(BatchSampler):
    """What is left of a batch sampler's order after its first samples, in batches cut anew.

    `head` is the order's beginning, which a short last round is filled from.
    """

    def __init__(self, batch_sampler: Any, num_done: int, head_size: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_done = num_done
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # None where batches vary
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.head: list[Any] = []
        self._head_size = head_size

    @property
    def sampler(self) -> Any:
        """The sampler of single indices below, where there is one."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        size = batch_samples(self.batch_sampler)
        total = order_length(self.batch_sampler)
        if total is None:
            raise TypeError("the sampler below does not know its length")
        left = Position(self.num_done, size).rounds_left(total, drop_last=self.drop_last)
        return left or 0

    def __iter__(self) -> Iterator[list[Any]]:
        if _is_ours(self.batch_sampler, "batches_after"):
            yield from self.batch_sampler.batches_after(self.num_done)
            return
        if self.batch_size is None:
            yield from islice(iter(self.batch_sampler), self.num_done, None)
            return
        order = _order(self.batch_sampler)
        self.head = list(islice(order, self._head_size))
        rest = chain(self.head[self.num_done :], order)
        deque(islice(rest, max(0, self.num_done - self._head_size)), maxlen=0)
        while batch := list(islice(rest, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch


def batch_samples(batch_sampler: Any) -> int:
    """Return how many samples a batch stands for; 1 where batches cannot be cut otherwise."""
    name = "usual_size" if _is_ours(batch_sampler, "usual_size") else "batch_size"
    return int(getattr(batch_sampler, name, None) or 1)


def order_length(batch_sampler: Any) -> int | None:
    """Return how many samples an epoch's order has, whatever is dropped of it."""
    try:
        if _is_ours(batch_sampler, "num_samples"):
            return int(batch_sampler.num_samples)
        if type(batch_sampler) is BatchSampler:
            return len(batch_sampler.sampler)  # type: ignore[arg-type]  # those that have a length
        return len(batch_sampler) * batch_samples(batch_sampler)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def _order(batch_sampler: Any) -> Iterator[Any]:
    """Yield the epoch's samples, also those at its end that make no whole batch."""
    if _is_ours(batch_sampler, "order"):
        return iter(batch_sampler.order())
    if type(batch_sampler) is BatchSampler:
        return iter(batch_sampler.sampler)
    return chain.from_iterable(batch_sampler)


def _is_ours(batch_sampler: Any, name: str) -> bool:
    """Whether it has this, and means what is meant here; a user's own may be called the same."""
    return isinstance(batch_sampler, LaidOut) and hasattr(batch_sampler, name)
