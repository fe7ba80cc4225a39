"""The loss curve of a loop of the user's own: what goes through backward, added up on the device.

Nobody waits at a step. At a point of the curve each rank reads its sum: the mean since the last
point is written by the main one, of all ranks' losses. No rank waits for another there, since a
loop of one's own need not bring all of them to the same place: they tell theirs on the board, and
the main one looks at its next point.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

import torch

from anytrain.core.records import BACKWARD
from anytrain.engine.recording.record import Record
from anytrain.machine.backends import running_sum
from anytrain.machine.parallel.world import World

_DENSE, _EVERY = 10, 10
"""After each of the first updates there is a point, then after so many."""
_MANY, _RARELY = 500, 50
"""Beyond these updates a point comes more rarely: reading one waits for the device."""
_MOST = 50
"""At the end of an epoch a point comes early, if this part of all updates has none yet."""
_LATE = 3
"""So many points may wait for what the other ranks have to tell."""
_PATIENCE_S, _LOOK_S = 1.0, 0.01
_curves = count()


class LoopPosition(Protocol):
    """Where the loop stands."""

    updates: int

    @property
    def at_end(self) -> bool:
        """Whether this was its loader's last batch."""


LossSum = tuple[float, int]
"""The losses of one rank since the last point, added up, and how many they were."""


class LossCurve:
    """The losses since the last point of the curve."""

    def __init__(
        self, record: Record, world: World, cursor: LoopPosition, begin: Callable[[], None]
    ) -> None:
        self._record, self._world, self._begin = record, world, begin
        self._cursor = cursor
        self._sum: torch.Tensor | None = None
        self._num = 0
        self._at = 0
        """The update of the last point."""
        self._first = 0.0
        """What the sum begins with: a checkpoint may have been made before its point was due."""
        self._name = f"loss/{next(_curves)}"
        self._num_points = 0
        self._waiting: deque[tuple[int, int, LossSum]] = deque()
        """Points that other ranks have not told their part of: number, update, own part."""
        self._is_over = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy writes nothing

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss; nobody waits. One with several values is nobody's curve."""
        if self._is_over or loss.numel() != 1:
            return
        loss = loss.detach()
        if self._sum is None:
            self._sum = running_sum.zero(loss.device)
            running_sum.put(self._sum, torch.tensor(self._first))
        if loss.device != self._sum.device:
            loss = loss.to(self._sum.device, non_blocking=True)
        running_sum.add(self._sum, loss if loss.ndim == 0 else loss.reshape(()))
        self._num += 1

    def note(self) -> None:
        """Write a point if one is due; called between two steps."""
        cursor = self._cursor
        if self._num and not self._is_over and _is_due(self._at, cursor.updates, cursor.at_end):
            self._point(cursor.updates)

    def end(self) -> None:
        """Write what is left; there will be no more."""
        if self._is_over:
            return
        if self._num and self._cursor.updates > self._at:
            self._point(self._cursor.updates)
        until = time.monotonic() + _PATIENCE_S
        with self._record.harmless():
            while self._waiting and not self._settle() and time.monotonic() < until:
                time.sleep(_LOOK_S)
            self._settle(most=0)
        self._is_over = True

    def leave_to_user(self) -> None:
        """Write no more: the user logs a loss, and that one is shown."""
        self._is_over = True
        self._waiting.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what was added up since the last point; waits for the device."""
        whole, num = self._read()
        return {"sum": whole, "num": num, "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at, self._num, self._first = state["at"], state["num"], state["sum"]
        if self._sum is not None:
            running_sum.put(self._sum, torch.tensor(self._first))

    def _read(self) -> LossSum:
        whole = self._first if self._sum is None else float(running_sum.readable(self._sum))
        return whole, self._num

    def _point(self, updates: int) -> None:
        """Take what there is for the point after this update; an error here stops no run."""
        with self._record.harmless():
            own = self._read()
            self._num, self._first = 0, 0.0
            if self._sum is not None:
                running_sum.restart(self._sum)
            self._at = updates
            self._num_points += 1
            if self._world.rank == 0:
                self._waiting.append((self._num_points, updates, own))
                self._settle(most=_LATE if self._world.size > 1 else 0)
            else:
                key = f"{self._name}/{self._num_points}/{self._world.rank}"
                with suppress(Exception):  # the main one has gone, and nobody asks any more
                    self._world.board.post(key, f"{updates} {own[0]!r} {own[1]}")

    def _settle(self, most: int | None = None) -> bool:
        """Write the points that all ranks have told of, and the oldest of more than `most`."""
        while self._waiting:
            number, updates, own = self._waiting[0]
            told = [self._told(number, updates, rank) for rank in range(1, self._world.size)]
            if None in told and (most is None or len(self._waiting) <= most):
                return False
            self._waiting.popleft()
            shares = [own, *(share for share in told if share is not None)]
            whole, num = sum(share[0] for share in shares), sum(share[1] for share in shares)
            self._begin()
            self._record.log(updates, None, {"loss": whole / num}, event=BACKWARD)
        return True

    def _told(self, number: int, updates: int, rank: int) -> LossSum | None:
        try:
            posted = self._world.board.read(f"{self._name}/{number}/{rank}")
        except Exception:  # noqa: BLE001  the store is gone, as at the end of a job
            return None
        if posted is None:
            return None
        at, whole, num = posted.split()
        # A rank that has run out of batches is elsewhere: its losses are of another point.
        return (float(whole), int(num)) if int(at) == updates else (0.0, 0)


def _is_due(last: int, now: int, ends_walk: bool) -> bool:
    """Whether a point is due after `now` updates, where the last one was after `last`.

    It goes by updates alone, so that a run that is resumed has the points of one that is not.
    """
    every = 1 if now <= _DENSE else _EVERY if now <= _MANY else _RARELY
    return now // every > last // every or (ends_walk and (now - last) * _MOST >= now)


def _nothing() -> None:
    """Return no curve, for whatever was pickled with one."""
