"""Play torch's CUDA allocator on the memory that a traced step takes and gives back.

Tensors ask for bytes; the allocator hands out blocks of segments that it keeps. What it counts as
allocated is the blocks, which may be up to 1 MiB larger than what was asked for; what a GPU runs
out of is the segments. The sizes below are those of torch's CUDACachingAllocator with its default
settings, the same from torch 2.0 on.

Of free blocks of one size the one at the lowest address is taken. Here a later segment lies higher;
a driver may put it lower, and then blocks that are not split may come to a MiB more or less.

INVARIANT: the same events give the same blocks. Nothing here knows torch or a GPU.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 2**20
SMALLEST = 512
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB
_SEGMENT_STEP = 2 * MIB

Event = tuple[int, int]
"""Which memory, and its bytes; 0 bytes where it is given back."""


def rounded(num_bytes: int, step: int = SMALLEST) -> int:
    """Return the bytes of the block that holds so many.

    >>> rounded(1), rounded(512), rounded(513)
    (512, 512, 1024)
    """
    return max(step, -(-num_bytes // step) * step)


class Full(Exception):
    """The memory that may be used does not hold what was asked for."""


class _Block:
    """A piece of a segment, with the pieces before and behind it."""

    __slots__ = ("address", "before", "behind", "is_free", "is_small", "size")

    def __init__(self, address: int, size: int, is_small: bool) -> None:
        self.address, self.size, self.is_small = address, size, is_small
        self.before: _Block | None = None
        self.behind: _Block | None = None
        self.is_free = False


@dataclass(frozen=True, slots=True)
class Played:
    """What an allocator came to on a list of events."""

    allocated_bytes: int
    """The most that blocks in use held: torch.cuda.max_memory_allocated()."""
    reserved_bytes: int
    """The most that segments held: torch.cuda.max_memory_reserved()."""
    fits: bool
    """Whether it never ran out of the memory that it may use."""
    num_flushes: int
    """How often it had to give its cache back first, which stalls the GPU."""


class Allocator:
    """Segments and their blocks; `limit` is what the segments may hold together."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._at: dict[int, _Block] = {}
        """The free blocks by address."""
        self._held: dict[int, _Block] = {}
        self._next_address = 0
        self.allocated = self.reserved = 0
        self.most_allocated = self.most_reserved = 0
        self.num_flushes = 0

    def take(self, which: int, num_bytes: int) -> None:
        """Hand out memory, or raise Full."""
        size = rounded(num_bytes)
        is_small = size <= _SMALL
        block = self._found(size, is_small) or self._segment(size, is_small)
        rest = block.size - size
        if rest >= SMALLEST if is_small else rest > _SMALL:
            self._split(block, size)
        block.is_free = False
        self._held[which] = block
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def give(self, which: int) -> None:
        """Take memory back; what was never handed out is none of this allocator's."""
        block = self._held.pop(which, None)
        if block is None:
            return
        self.allocated -= block.size
        for near in (block.before, block.behind):
            if near is not None and near.is_free:
                self._leave(near)
                block = _joined(block, near)
        self._enter(block)

    def flush(self) -> None:
        """Give whole free segments back to the GPU."""
        self.num_flushes += 1
        whole = [b for b in self._at.values() if b.before is None and b.behind is None]
        for block in whole:
            self._leave(block)
            self.reserved -= block.size

    def _found(self, size: int, is_small: bool) -> _Block | None:
        """Return the smallest free block that is large enough."""
        free = self._free[is_small]
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        block = self._at[free[place][1]]
        self._leave(block)
        return block

    def _segment(self, size: int, is_small: bool) -> _Block:
        if is_small:
            total = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            total = _LARGE_SEGMENT
        else:
            total = rounded(size, _SEGMENT_STEP)
        if self._limit is not None and self.reserved + total > self._limit:
            self.flush()
            if self.reserved + total > self._limit:
                raise Full
        self.reserved += total
        self.most_reserved = max(self.most_reserved, self.reserved)
        block = _Block(self._next_address, total, is_small)
        self._next_address += total
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.is_small)
        rest.before, rest.behind = block, block.behind
        if rest.behind is not None:
            rest.behind.before = rest
        block.behind, block.size = rest, size
        self._enter(rest)

    def _enter(self, block: _Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.address))
        self._at[block.address] = block

    def _leave(self, block: _Block) -> None:
        block.is_free = False
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size, block.address))]
        del self._at[block.address]


def _joined(one: _Block, other: _Block) -> _Block:
    first, last = (one, other) if one.address < other.address else (other, one)
    first.size += last.size
    first.behind = last.behind
    if first.behind is not None:
        first.behind.before = first
    return first


def play(events: Iterable[Event], limit: int | None = None) -> Played:
    """Return what the allocator comes to on these events, within `limit` bytes of segments.

    >>> play([(1, 3 * MIB), (2, 100), (1, 0), (2, 0)])
    Played(allocated_bytes=3146240, reserved_bytes=23068672, fits=True, num_flushes=0)
    """
    allocator, fits = Allocator(limit), True
    try:
        for which, num_bytes in events:
            if num_bytes:
                allocator.take(which, num_bytes)
            else:
                allocator.give(which)
    except Full:
        fits = False
    return Played(allocator.most_allocated, allocator.most_reserved, fits, allocator.num_flushes)
