"""Which shapes come often enough for a recording to be repaid.

To record a step takes as long as several steps op by op. In a run whose batches have a length of
their own each, a shape may come twice and never again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from anytrain.engine.assemble.fast_room import UNKNOWN_LENGTH

_REPAID = 6
"""Visits that repay a recording: on an H200 one of BERT-base takes up to 0.25 s, and a step 7 ms
instead of 45."""
_WINDOW = 32


@dataclass(slots=True)
class Payback:
    """The shapes that a run's last steps had, and how many steps are to come.

    >>> returns = Payback(steps_left=lambda: 18)
    >>> for length in (64, 64, 80): returns.count(length)
    >>> returns.repay(64), returns.repay(80), returns.repay(96)
    (True, True, False)
    """

    steps_left: Callable[[], float] = lambda: UNKNOWN_LENGTH
    """Asked how many steps are to come, the one at hand among them."""
    are_few: Callable[[], bool] = lambda: False
    """Asked if shapes were chosen so that each comes again and again."""
    num_steps: int = 0
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """Hashes: a shape itself may hold on to things."""

    def count(self, shape: Hashable) -> None:
        """Take note of a step of this shape."""
        self.num_steps += 1
        self._recent.append(hash(shape))

    def repay(self, shape: Hashable, num_recorded: int = 0) -> bool:
        """Whether steps to come will probably repay a recording, one more than so many."""
        share = self._recent.count(hash(shape)) / len(self._recent) if self._recent else 0.0
        if self.are_few():
            share = max(share, 1 / (num_recorded + 1))
        return share > 0 and share * self.steps_left() >= _REPAID

    def is_gone(self, shape: Hashable) -> bool:
        """Whether no step of late had this shape."""
        return len(self._recent) == _WINDOW and hash(shape) not in self._recent


def unlimited() -> float:
    """Record whatever has come once: somebody asked for it."""
    return math.inf
