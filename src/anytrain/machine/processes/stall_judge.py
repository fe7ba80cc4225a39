"""Tell a frozen rank from a slow one, out of the beats that one rank hears.

Pure: no clock, no threads, no process. Silence is added up in small steps of the listener's own
time, so that suspending the whole job and waking it hours later counts as a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from anytrain.machine.processes.heartbeat import Beat

LONGEST_TICK_S = 2.0
START_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Heard:
    """The last message of a peer; `count` grows with each one, `left` says goodbye."""

    count: int
    beat: Beat
    left: bool = False


@dataclass(frozen=True, slots=True)
class Frozen:
    """A rank that gives no sign of life any more."""

    rank: int
    silent_s: float
    beat: Beat | None


@dataclass(frozen=True, slots=True)
class Lagging:
    """Ranks that are alive and have not moved for long, while others wait for them."""

    sentence: str
    stack: str = ""
    """The calls that the first of them is in, on lines of their own."""


@dataclass(slots=True)
class _Silence:
    count: int = -1
    seconds: float = 0.0


@dataclass(slots=True)
class StallJudge:
    """What one rank concludes about the others, tick by tick."""

    rank: int
    size: int
    stall_s: float
    store_rank: int | None = None
    """The rank whose process holds the store that carries the beats; None: none of them."""
    _silence: dict[int, _Silence] = field(default_factory=dict)
    _store_silent_s: float = 0.0
    _still_s: float = 0.0
    _moves: dict[int, int] = field(default_factory=dict)
    _told: bool = False

    def ranks_to_hear(self) -> list[int]:
        """Return whose beats matter to this rank now.

        Rank 0 listens to all. The others listen to rank 0 alone until it falls silent, so that
        a large world costs the store a few reads a second and not a square of them.
        """
        others = [r for r in range(self.size) if r != self.rank]
        quiet = self._silence.get(0, _Silence()).seconds >= self.stall_s / 2
        return others if self.rank == 0 or quiet else [0]

    def tick(
        self, elapsed_s: float, heard: Mapping[int, Heard], own: Beat, answered: bool
    ) -> Frozen | Lagging | None:
        """Take in what was heard since the last tick; return a verdict when there is one.

        `answered` says whether the store has answered since the last tick.
        """
        elapsed_s = min(elapsed_s, LONGEST_TICK_S, self.stall_s / 3)
        if not answered:
            self._store_silent_s += elapsed_s
            return self._store_verdict(heard)
        self._store_silent_s = 0.0
        for rank in self.ranks_to_hear():
            self._listen(rank, heard.get(rank), elapsed_s)
        frozen = self._frozen_ranks(heard)
        if self.rank != self._speaker(frozen, heard):
            return None
        if frozen:
            return self._frozen(frozen[0], heard)
        return self._lagging(elapsed_s, heard, own)

    def forgive(self, rank: int) -> None:
        """Start counting a rank's silence again: something else shows that it lives."""
        self._silence[rank] = _Silence(self._silence.get(rank, _Silence()).count)

    def _listen(self, rank: int, heard: Heard | None, elapsed_s: float) -> None:
        silence = self._silence.setdefault(rank, _Silence())
        count = -1 if heard is None else heard.count
        if count != silence.count:
            silence.count, silence.seconds = count, 0.0
        else:
            silence.seconds += elapsed_s

    def _frozen_ranks(self, heard: Mapping[int, Heard]) -> list[int]:
        return [
            rank
            for rank, silence in sorted(self._silence.items())
            if silence.seconds >= self._patience_s(silence) and not _left(heard, rank)
        ]

    def _patience_s(self, silence: _Silence) -> float:
        """A rank that was never heard may still be opening its connection."""
        return self.stall_s if silence.count >= 0 else self.stall_s + START_GRACE_S

    def _speaker(self, frozen: list[int], heard: Mapping[int, Heard]) -> int:
        """Return the lowest rank that lives: only it speaks and acts."""
        gone = {*frozen, *(r for r in range(self.size) if _left(heard, r))} - {self.rank}
        return next(r for r in range(self.size) if r not in gone)

    def _frozen(self, rank: int, heard: Mapping[int, Heard]) -> Frozen:
        last = heard.get(rank)
        return Frozen(rank, self._silence[rank].seconds, last.beat if last else None)

    def _store_verdict(self, heard: Mapping[int, Heard]) -> Frozen | None:
        """A store that does not answer is held by a frozen rank, if a rank holds it at all."""
        if self._store_silent_s < self.stall_s or self.store_rank in (None, self.rank):
            return None
        # The lowest rank besides the store's speaks; it cannot ask whether lower ones live.
        if self.rank != min(r for r in range(self.size) if r != self.store_rank):
            return None
        last = heard.get(self.store_rank or 0)
        return Frozen(self.store_rank or 0, self._store_silent_s, last.beat if last else None)

    def _lagging(self, elapsed_s: float, heard: Mapping[int, Heard], own: Beat) -> Lagging | None:
        beats = [own, *(h.beat for h in heard.values() if not h.left)]
        moves = {b.rank: b.moves for b in beats}
        if moves != self._moves:
            self._moves, self._still_s, self._told = moves, 0.0, False
            return None
        self._still_s += elapsed_s
        if self._told or self._still_s < self.stall_s:
            return None
        self._told = True
        sentence = describe_lag(beats, self._still_s)
        return Lagging(sentence, _stack(beats)) if sentence else None


def describe_lag(beats: list[Beat], still_s: float) -> str | None:
    """Say who keeps whom waiting; None where nobody can be told from the others."""
    if len({(b.step, b.doing, b.waiting, b.line) for b in beats}) == 1:
        return None
    # Those who are not waiting come first: one of them is what the others wait for.
    behind = [b for b in beats if not b.waiting]
    waiting = [b for b in beats if b.waiting]
    places = "; ".join(_places(group) for group in (behind, waiting) if group)
    return f"nothing has moved for {still_s:.0f} s: {places}."


def _stack(beats: list[Beat]) -> str:
    """Show where the one is that the others wait for; "" where nobody is known to be."""
    behind = [beat for beat in beats if not beat.waiting and beat.stack]
    if not behind or len(behind) == len(beats):
        return ""
    first = min(behind, key=lambda beat: (beat.step, beat.rank))
    return f" Rank {first.rank}'s Python stack:\n{first.stack}"


def _places(beats: list[Beat]) -> str:
    """Return "rank 0 is at step 3 (saving); ranks 1, 2 wait at step 4 (barrier 'x')"."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for beat in sorted(beats, key=lambda b: (b.step, b.rank)):
        groups.setdefault((beat.where(), beat.waiting), []).append(beat.rank)
    return "; ".join(
        f"{_ranks(ranks)} {_verb(waiting, len(ranks))} {where}"
        for (where, waiting), ranks in groups.items()
    )


def _verb(waiting: bool, num_ranks: int) -> str:
    if waiting:
        return "waits" if num_ranks == 1 else "wait"
    return "is" if num_ranks == 1 else "are"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _left(heard: Mapping[int, Heard], rank: int) -> bool:
    last = heard.get(rank)
    return last is not None and last.left
