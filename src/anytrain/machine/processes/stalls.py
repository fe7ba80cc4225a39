"""Watch the other ranks of a job, and tell a frozen rank from a slow one.

Each rank has two threads: one talks to the store, which may hang when the rank that holds it is
frozen; the other only judges, and so always gets to speak. The judging itself is pure: no clock,
no threads, no process. Silence is added up in small steps of the listener's own time, so that
suspending the whole job and waking it hours later counts as a moment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import psutil

from anytrain.core.errors import PeerLost
from anytrain.machine.processes import notes, parent_death, stack_dumps
from anytrain.machine.processes.heartbeat import Beat, Pulse, name_ranks, read_beat

RESUME = (
    "start the same command again: a loop goes on by resume() or load_state(), a Trainer with "
    "--resume_from_checkpoint True"
)
_BUSY_CPU_S = 0.05
"""In a second; on a host with more work than cores, one that computes gets little more."""
_OPENING_S = 30.0
"""How long opening the store may take: it asks for the names of hosts."""
LONGEST_TICK_S = 2.0
START_GRACE_S = 30.0


class Wire(Protocol):
    """What carries the beats; its calls may raise when its other end is gone."""

    def post(self, key: str, value: str) -> None:
        """Publish a value."""

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return what was published under the keys, None where nothing was."""


class RankWatch:
    """This rank's beats out, the others' in, and a verdict when one of them is frozen."""

    def __init__(
        self,
        pulse: Pulse,
        wire: Wire,
        size: int,
        stall_s: float,
        store_rank: int | None,
        end_job: Callable[[Frozen, str], None] | None = None,
    ) -> None:
        self._pulse, self._wire, self._size = pulse, wire, size
        self._judge = StallJudge(pulse.rank, size, stall_s, store_rank)
        self._end_job = end_job or self._leave
        self._tick_s = min(1.0, stall_s / 5)
        self._heard: dict[int, PeerBeat] = {}
        self._followed: set[int] = set()
        """Ranks that end because they have lost another."""
        self._count = 0
        self._rounds = 0
        self._shifts = 0
        self._place: object = None
        self._lost = False
        self._stop = threading.Event()
        self._parent = os.getppid()
        # From here on this watch ends the rank with its launcher, and says so. Not a moment
        # earlier: a launcher that has ended before its number was read would not be missed.
        self._death_signal = parent_death.clear_death_signal()
        self._threads = [
            threading.Thread(target=self._talk, name="anytrain-beat", daemon=True),
            threading.Thread(target=self._listen, name="anytrain-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def heard(self, rank: int) -> PeerBeat | None:
        """Return a rank's last message; the main process hears all, the others hear it."""
        return self._heard.get(rank)

    def gone(self) -> list[Beat]:
        """Return the last words of the ranks whose process on this host does not exist any more.

        A rank that asks has lost another: it says so, and is not named for ending by that.
        """
        others = [rank for rank in range(self._size) if rank != self._pulse.rank]
        with suppress(Exception):  # the store may have gone with one of them
            self._wire.post(f"lost/{self._pulse.rank}", "another")
            self._read(others)
            said = self._wire.read_all([f"lost/{rank}" for rank in others])
            self._followed.update(r for r, words in zip(others, said, strict=True) if words)
        ended = [heard.beat for _, heard in sorted(self._heard.items()) if _has_ended(heard)]
        return [beat for beat in ended if beat.rank not in self._followed] or ended

    def hush(self) -> None:
        """Stop at once and say nothing more: this process is on its way out."""
        self._stop.set()

    def leave(self) -> None:
        """Say goodbye, so that the others take silence for what it is."""
        hushed = self._stop.is_set()
        self._stop.set()
        parent_death.set_death_signal(self._death_signal)
        self._leave_with_parent()
        # A thread inside the store's native code when the interpreter goes down aborts the process.
        self._threads[0].join(_OPENING_S)
        if hushed or self._lost or self._threads[0].is_alive():
            return
        try:
            self._post(left=True)
        except Exception:  # noqa: BLE001  a store that is gone has nobody left to tell
            self._lost = True

    def _talk(self) -> None:
        while not self._stop.is_set():
            try:
                self._post()
                self._read(self._judge.ranks_to_hear())
            except Exception:  # noqa: BLE001  any failure of the wire means the same: it is gone
                self._lost = True
                return
            self._rounds += 1
            self._stop.wait(self._tick_s)

    def _post(self, left: bool = False) -> None:
        self._count += 1
        beat = self._now()
        fields = [getattr(beat, name) for name in Beat.__slots__]
        self._wire.post(f"beat/{beat.rank}", json.dumps([self._count, left, fields]))

    def _now(self) -> Beat:
        """Return this rank's beat with the line it is in; a change of line is a move too."""
        line, place = main_thread_place()
        if place != self._place:
            self._place = place
            self._shifts += 1
        beat = self._pulse.beat()
        stack = stack_dumps.describe(stack_dumps.main_stack())
        return replace(beat, moves=beat.moves + self._shifts, line=line, stack=stack)

    def _read(self, ranks: list[int]) -> None:
        values = self._wire.read_all([f"beat/{r}" for r in ranks])
        for rank, value in zip(ranks, values, strict=True):
            if value is not None:
                count, left, fields = json.loads(value)
                self._heard[rank] = PeerBeat(count, Beat(*fields), left)

    def _listen(self) -> None:
        before, rounds = time.monotonic(), 0
        while not self._stop.wait(self._tick_s):
            self._leave_with_parent()
            now = time.monotonic()
            answered = self._rounds != rounds
            rounds = self._rounds
            # Before the first round the connection is being opened, which may take its time.
            if rounds and not self._lost:
                heard = dict(self._heard)
                verdict = self._judge.tick(now - before, heard, self._now(), answered)
                self._act(verdict)
            before = now

    def _leave_with_parent(self) -> None:
        """End this rank when the launcher that listened to it was killed."""
        if self._pulse.beats is not None and os.getppid() != self._parent:
            say(f"anytrain: rank {self._pulse.rank} ends: its launcher is gone.")
            shutil.rmtree(self._pulse.beats, ignore_errors=True)
            os._exit(1)

    def _act(self, verdict: Frozen | Lagging | None) -> None:
        if isinstance(verdict, Lagging):
            say(f"anytrain: {verdict.sentence} The job goes on.{verdict.stack}")
        elif isinstance(verdict, Frozen):
            if verdict.beat is None and self._pulse.beats is not None:
                # It never got to speak, but a rank of this host has left its file.
                verdict = replace(verdict, beat=read_beat(self._pulse.beats, verdict.rank))
            before = self._heard.get(verdict.rank)
            state = process_state(verdict.beat)
            after = self._heard.get(verdict.rank)
            spoke = before is not None and after is not None and before.count != after.count
            if spoke or state == "busy":
                # It computes in native code that keeps Python's lock: slow, not frozen.
                self._judge.forgive(verdict.rank)
            else:
                self._end_job(verdict, state)

    def _leave(self, verdict: Frozen, state: str) -> None:
        """Name the frozen rank, and end the job."""
        if self._stop.is_set():
            return
        if self._pulse.beats is not None and verdict.beat is not None:
            # The file is up to date to the last step, a beat only to the last second.
            last = read_beat(self._pulse.beats, verdict.rank)
            if last is not None and last.pid == verdict.beat.pid:
                seen = verdict.beat
                verdict = replace(verdict, beat=replace(last, line=seen.line, stack=seen.stack))
        error = describe_frozen(verdict, state)
        notes.leave(
            self._pulse.beats,
            self._pulse.rank,
            "stall",
            json.dumps([error.what, error.why, error.fix]),
        )
        if self._pulse.beats is None:
            say(f"anytrain: {error}")
            _end_frozen(verdict.beat)
        os._exit(1)


def _has_ended(heard: PeerBeat) -> bool:
    if heard.left or heard.beat.host != socket.gethostname():
        return False
    try:
        return psutil.Process(heard.beat.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def describe_frozen(verdict: Frozen, state: str) -> PeerLost:
    """Return the message that names a frozen rank."""
    beat = verdict.beat
    where = f"was {beat.where()}" if beat else "was never heard of"
    at = f" (pid {beat.pid} on {beat.host})" if beat else ""
    stack = f" Its Python stack when it last spoke:\n{beat.stack}" if beat and beat.stack else ""
    resume = ""
    if beat is not None and state == "stopped":
        resume = f"find out who stopped it (`kill -CONT {beat.pid}` would have woken it), then "
    return PeerLost(
        f"Rank {verdict.rank}{at} gave no sign of life for {verdict.silent_s:.0f} s, "
        "so the job was ended.",
        why=f"it {_STATES[state]}; it {where}.{stack}",
        fix=f"{resume}{RESUME}. ANYTRAIN_STALL_S or --stall_timeout sets the time; 0 waits on.",
    )


_STATES = {
    "stopped": "is stopped (SIGSTOP, or Ctrl-Z)",
    "gone": "is gone: its process does not exist any more",
    "zombie": "has died",
    "disk-sleep": "hangs in the kernel (uninterruptible sleep: a disk, network file or driver)",
    "silent": "runs no Python and uses no processor time",
    "unheard": "did not begin, or is on another machine",
    "unseen": "is on another machine, which does not answer",
}


def process_state(beat: Beat | None) -> str:
    """Return what the system says of the rank's process, one of the words explained above."""
    if beat is None:
        return "unheard"
    if beat.host != socket.gethostname():
        return "unseen"
    try:
        process = psutil.Process(beat.pid)
        status = process.status()
        if status == psutil.STATUS_ZOMBIE:
            return "zombie"
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return "stopped"
        used = sum(process.cpu_times()[:2])
        time.sleep(1.0)
        if sum(process.cpu_times()[:2]) - used > _BUSY_CPU_S:
            return "busy"
        return "disk-sleep" if process.status() == psutil.STATUS_DISK_SLEEP else "silent"
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:
        return "unseen"


def main_thread_place() -> tuple[str, object]:
    """Return the script's line that the main thread is in, and a token of the exact place."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", None
    place = (frame.f_code, frame.f_lasti)
    while frame is not None and stack_dumps.is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "", place
    return f"{os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}", place


def _end_frozen(beat: Beat | None) -> None:
    """Kill a frozen rank of this host: other launchers would wait half a minute for it."""
    if beat is not None and beat.host == socket.gethostname():
        try:
            os.kill(beat.pid, signal.SIGKILL)
        except OSError:
            return


def say(text: str) -> None:
    """Write past whatever the script has done to sys.stderr, in one piece."""
    with suppress(OSError, ValueError):  # whoever read it may be gone
        sys.stderr.flush()
        os.write(2, f"{text}\n".encode())


@dataclass(frozen=True, slots=True)
class PeerBeat:
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
        self, elapsed_s: float, heard: Mapping[int, PeerBeat], own: Beat, answered: bool
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

    def _listen(self, rank: int, heard: PeerBeat | None, elapsed_s: float) -> None:
        silence = self._silence.setdefault(rank, _Silence())
        count = -1 if heard is None else heard.count
        if count != silence.count:
            silence.count, silence.seconds = count, 0.0
        else:
            silence.seconds += elapsed_s

    def _frozen_ranks(self, heard: Mapping[int, PeerBeat]) -> list[int]:
        return [
            rank
            for rank, silence in sorted(self._silence.items())
            if silence.seconds >= self._patience_s(silence) and not _left(heard, rank)
        ]

    def _patience_s(self, silence: _Silence) -> float:
        """A rank that was never heard may still be opening its connection."""
        return self.stall_s if silence.count >= 0 else self.stall_s + START_GRACE_S

    def _speaker(self, frozen: list[int], heard: Mapping[int, PeerBeat]) -> int:
        """Return the lowest rank that lives: only it speaks and acts."""
        gone = {*frozen, *(r for r in range(self.size) if _left(heard, r))} - {self.rank}
        return next(r for r in range(self.size) if r not in gone)

    def _frozen(self, rank: int, heard: Mapping[int, PeerBeat]) -> Frozen:
        last = heard.get(rank)
        return Frozen(rank, self._silence[rank].seconds, last.beat if last else None)

    def _store_verdict(self, heard: Mapping[int, PeerBeat]) -> Frozen | None:
        """A store that does not answer is held by a frozen rank, if a rank holds it at all."""
        if self._store_silent_s < self.stall_s or self.store_rank in (None, self.rank):
            return None
        # The lowest rank besides the store's speaks; it cannot ask whether lower ones live.
        if self.rank != min(r for r in range(self.size) if r != self.store_rank):
            return None
        last = heard.get(self.store_rank or 0)
        return Frozen(self.store_rank or 0, self._store_silent_s, last.beat if last else None)

    def _lagging(
        self, elapsed_s: float, heard: Mapping[int, PeerBeat], own: Beat
    ) -> Lagging | None:
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
        f"{name_ranks(ranks)} {_verb(waiting, len(ranks))} {where}"
        for (where, waiting), ranks in groups.items()
    )


def _verb(waiting: bool, num_ranks: int) -> str:
    if waiting:
        return "waits" if num_ranks == 1 else "wait"
    return "is" if num_ranks == 1 else "are"


def _left(heard: Mapping[int, PeerBeat], rank: int) -> bool:
    last = heard.get(rank)
    return last is not None and last.left
