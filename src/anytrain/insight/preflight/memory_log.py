"""Record the memory of the fake device: allocations and frees, with their owners."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from anytrain.insight.preflight.fake_device.device import Storage, storage_of
from anytrain.insight.preflight.trace import Held, Moment, Owner, Phase

MAX_MOMENTS = 2000
_OWNER_OF: dict[Phase, Owner] = {
    "make": "other",
    "data": "batch",
    "forward": "activations",
    "backward": "other",
    "clip": "other",
    "optimizer": "other",
    "evaluate": "activations",
}


@dataclass(slots=True, eq=False)
class Block:
    """One piece of memory, as long as anybody wants to know of it."""

    num_bytes: int
    owner: Owner
    phase: Phase
    module: str
    number: int


class MemoryLog:
    """What the fake device holds now, and what it held at each change since `restart`."""

    def __init__(self) -> None:
        self.total = 0
        self._blocks: dict[int, Block] = {}
        self._begun: list[Block] = []
        """What was held when the log begins."""
        self._log: list[tuple[int, Phase, str, Block, bool]] = []
        self._events: list[tuple[int, int]] = []
        """All that was taken and given back since the first line; see `Held.events`."""
        self._began = 0
        self.num_ops = 0
        self.phase: Phase = "make"

    def born(self, storage: Storage, module: str) -> None:
        """Count new memory until its storage dies."""
        owner: Owner = _OWNER_OF[self.phase]
        block = Block(storage.num_bytes, owner, self.phase, module, len(self._events))
        if block.num_bytes:
            self._events.append((block.number, block.num_bytes))
        storage.born, storage.on_death = block, self._died
        self._blocks[id(block)] = block
        self.total += block.num_bytes
        self._log.append((self.num_ops, self.phase, module, block, True))

    def _died(self, block: Block) -> None:
        del self._blocks[id(block)]
        self.total -= block.num_bytes
        if block.num_bytes:
            self._events.append((block.number, 0))
        self._log.append((self.num_ops, self.phase, block.module, block, False))

    def passed(self, num_bytes: int, *, is_certain: bool) -> None:
        """Note memory that a kernel took and gave back; a guess has a number below 0."""
        if num_bytes:
            number = len(self._events)
            which = number if is_certain else -1 - number
            self._events += [(which, num_bytes), (which, 0)]

    @staticmethod
    def own(tensor: Any, owner: Owner) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        with torch._C.DisableTorchFunction():
            known = storage_of(tensor) if tensor.is_meta else None
        if known is not None and known.born is not None:
            known.born.owner = owner

    def restart(self) -> None:
        self._begun = list(self._blocks.values())
        self._log = []
        self._began = len(self._events)
        self.num_ops = 0

    def held(self) -> Held:
        """Return what the log's peak held, and how it came there."""
        total = sum(block.num_bytes for block in self._begun)
        peak, peak_at = total, 0
        moments: list[Moment] = []
        for number, (op, phase, module, block, is_born) in enumerate(self._log, 1):
            total += block.num_bytes if is_born else -block.num_bytes
            moments.append(Moment(op, phase, module, total))
            if total > peak:
                peak, peak_at = total, number
        alive = {id(block): block for block in self._begun}
        for _, _, _, block, is_born in self._log[:peak_at]:
            if is_born:
                alive[id(block)] = block
            else:
                alive.pop(id(block), None)
        by_owner: Counter[Owner] = Counter()
        by_module: Counter[str] = Counter()
        for block in alive.values():
            by_owner[block.owner] += block.num_bytes
            if block.owner == "activations":
                by_module[block.module] += block.num_bytes
        return Held(
            peak,
            dict(by_owner),
            dict(by_module),
            _thinned(moments, peak_at),
            tuple(self._events),
            (self._began, len(self._events)),
        )


def _thinned(moments: list[Moment], peak_at: int) -> tuple[Moment, ...]:
    """Return fewer moments: of each stretch the highest, so that no peak is lost."""
    if len(moments) <= MAX_MOMENTS:
        return tuple(moments)
    stretch = -(-len(moments) // MAX_MOMENTS)
    return tuple(
        max(moments[i : i + stretch], key=lambda moment: moment.total_bytes)
        for i in range(0, len(moments), stretch)
    )
