"""Find out whether all ranks come to a call that some scripts make on the main process alone.

The others are on their way into the next step then, and wait there for the main process: to meet
them in a collective call would hang the job. So ranks say on the board that they have come, and
for those that do not, their beats show where they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from anytrain.core.notices import give_notice
from anytrain.machine.parallel.world import Board
from anytrain.machine.processes.heartbeat import Beat, Pulse
from anytrain.machine.processes.stalls import PeerBeat, process_state

_SURE_BEATS = 3
"""So many signs of life from one and the same place, where a rank waits for others."""
_PATIENT_BEATS = 10
"""So many where it is not known what it does."""
_AGAIN_BEATS = 1, 3
"""The same, once the main process was alone before."""
_QUICK_S, _SLOW_S, _LONG_S = 0.002, 0.1, 30.0
Hear = Callable[[int], PeerBeat | None]


class RollCall:
    """One rank's part in such calls."""

    def __init__(self, board: Board, pulse: Pulse, size: int, hear: Hear) -> None:
        self._board, self._pulse, self._hear = board, pulse, hear
        self._comings = 0
        """How often this rank has come."""
        self._answered = dict.fromkeys(range(1, size), 0)
        """Which coming of each rank the main process has answered last."""
        self._num_alone = 0
        """How often the main process was alone, as far as this rank knows."""

    def call(self, what: str) -> str | None:
        """Return None once every rank has come; else say where the others are.

        Only the main process acts then; ranks that came all the same are told so.
        """
        with self._pulse.waiting(what):
            return self._wait_for_all(what) if self._pulse.rank == 0 else self._wait_for_main(what)

    def _wait_for_all(self, what: str) -> str | None:
        still = {rank: _Stillness() for rank in self._answered}
        pause, notice_at = _QUICK_S, time.monotonic() + _LONG_S
        while True:
            come = {rank: self._come(rank) for rank in self._answered}
            missing = [rank for rank, number in come.items() if number is None]
            absent = [rank for rank in missing if self._is_elsewhere(rank, still[rank])]
            if len(absent) == len(missing):
                break
            if time.monotonic() > notice_at:
                notice_at = math.inf
                _tell_waiting(what, missing)
            time.sleep(pause)
            pause = min(1.5 * pause, _SLOW_S)
        absence = self._describe_absent(absent)
        if absent:
            self._num_alone += 1
            self._board.post("muster/alone", str(self._num_alone))
        for rank, number in come.items():
            if number is not None:
                self._answered[rank] = number
                self._board.post(f"muster/answer/{rank}/{number}", absence)
        return absence or None

    def _come(self, rank: int) -> int | None:
        """Return which coming of a rank waits for an answer; None where it is not here."""
        text = self._board.read(f"muster/come/{rank}")
        if text is None or not text.endswith("here"):
            return None
        number = int(text.split()[0])
        return number if number > self._answered[rank] else None

    def _is_elsewhere(self, rank: int, still: _Stillness) -> bool:
        """Whether a rank will not come before the main process goes on."""
        heard = self._hear(rank)
        if heard is None:
            return False
        if heard.left:
            return True
        beat, beats = heard.beat, still.beats(heard)
        sure, patient = _AGAIN_BEATS if self._num_alone else (_SURE_BEATS, _PATIENT_BEATS)
        is_past = beat.doing == "backward" and beat.step >= self._pulse.beat().step
        if beat.waiting or is_past:
            return beats >= sure
        return beats >= patient and process_state(beat) != "busy"

    def _describe_absent(self, absent: list[int]) -> str:
        places = []
        for rank in absent[:3]:
            heard = self._hear(rank)
            places.append(f"rank {rank} {_where(heard)}")
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        return "; ".join(places) + more

    def _wait_for_main(self, what: str) -> str | None:
        self._comings += 1
        rank, number = self._pulse.rank, self._comings
        self._board.post(f"muster/come/{rank}", f"{number} here")
        gone, pause = _Stillness(), _QUICK_S
        try:
            while True:
                answer = self._board.read(f"muster/answer/{rank}/{number}")
                if answer is not None:
                    return answer or None
                if self._was_passed_over(what, gone):
                    self._board.post(f"muster/come/{rank}", f"{number} gone")
                    return f"rank {rank} came too late"
                time.sleep(pause)
                pause = min(1.5 * pause, _SLOW_S)
        finally:
            self._num_alone = self._counted_alone()

    def _counted_alone(self) -> int:
        return int(self._board.read("muster/alone") or 0)

    def _was_passed_over(self, what: str, gone: _Stillness) -> bool:
        """Whether the main process has gone on without this rank."""
        main = self._hear(0)
        if main is None or main.beat.doing == what or self._counted_alone() <= self._num_alone:
            return False
        return gone.beats(main) >= _SURE_BEATS


class _Stillness:
    """For how many signs of life a rank has not moved."""

    def __init__(self) -> None:
        self._since: tuple[int, int] | None = None
        """The moves of the rank, and the number of the message that told them first."""

    def beats(self, heard: PeerBeat) -> int:
        """Return how many there were, with this one."""
        if self._since is None or self._since[0] != heard.beat.moves:
            self._since = heard.beat.moves, heard.count
        return heard.count - self._since[1]


def _tell_waiting(what: str, missing: list[int]) -> None:
    ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    give_notice(
        f"{what} has waited {_LONG_S:.0f} s for rank {ranks}: every process is to call it.",
        stacklevel=6,
    )


def _where(heard: PeerBeat | None) -> str:
    if heard is None:
        return "was not heard of"
    if heard.left:
        return "has left the job"
    beat: Beat = heard.beat
    return f"is {beat.where()}"
