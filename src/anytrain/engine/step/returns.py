"""Which shapes come often enough for a recording to be repaid.

To record a step takes as long as several steps op by op. In a run whose batches have a length of
their own each, a shape may come twice and never again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

UNKNOWN_LENGTH = 100
"""How many more steps a loop is taken to have that does not say."""
_REPAID = 6
"""Visits that repay a recording: on an H200 one of BERT-base takes up to 0.25 s, and a step 7 ms
instead of 45."""
_MOST_REMEMBERED = 4096


@dataclass(slots=True)
class Returns:
    """The shapes that a run's steps had, and how many steps are to come.

    >>> returns = Returns(steps_left=lambda: 18)
    >>> for length in (64, 64, 80): returns.count(length)
    >>> returns.repay(64), returns.repay(80), returns.repay(96)
    (True, True, False)
    """

    steps_left: Callable[[], float] = lambda: UNKNOWN_LENGTH
    """Asked how many steps are to come, the one at hand among them."""
    are_few: Callable[[], bool] = lambda: False
    """Asked if shapes were chosen so that each comes again and again."""
    num_steps: int = 0
    _times: Counter[Hashable] = field(default_factory=Counter)

    def count(self, shape: Hashable) -> None:
        """Take note of a step of this shape."""
        self.num_steps += 1
        if len(self._times) >= _MOST_REMEMBERED:
            self._times.clear()
            self.num_steps = 1
        self._times[shape] += 1

    def repay(self, shape: Hashable, num_recorded: int = 0) -> bool:
        """Whether steps to come will probably repay a recording, one more than so many."""
        share = self._times[shape] / self.num_steps if self.num_steps else 0.0
        if self.are_few():
            share = max(share, 1 / (num_recorded + 1))
        return share > 0 and share * self.steps_left() >= _REPAID


def unlimited() -> float:
    """Record whatever has come once: somebody asked for it."""
    return math.inf
