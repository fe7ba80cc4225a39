"""Choose when to kill: at random, spread over the saves that an undisturbed run has made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anytrain.insight.proofs.restarts import Commit, Life


@dataclass(slots=True)
class Trap:
    """A kill that waits for a checkpoint, and then for a random while."""

    after_step: int | None
    """The step whose checkpoint must be there; None: a life that has saved nothing."""
    gap_s: float
    """How long an undisturbed run takes from there to its next save."""
    start_s: float
    """How long an undisturbed run takes from its start to its first save."""
    share: float
    """How much of that time to let pass."""
    _due: float | None = None

    def __call__(self, life: Life) -> bool:
        """Whether it is time."""
        if self._due is None:
            self._due = self._when(life)
        return self._due is not None and life.seconds >= self._due

    def _when(self, life: Life) -> float | None:
        if self.after_step is None or self._was_there(life):
            return self.share * self.start_s
        reached = [c.seconds for c in life.own_commits if c.manifest.step >= self.after_step]
        return reached[0] + self.share * self.gap_s if reached else None

    def _was_there(self, life: Life) -> bool:
        before = life.trial.commits[: life.num_before]
        return any(c.manifest.step >= (self.after_step or 0) for c in before)


def plan(commits: Sequence[Commit], kills: int, rng: random.Random) -> list[Trap]:
    """Return traps in the order of training, for a run that makes these saves.

    Each has its stretch of the run. The last waits for the second save, if there is a third: a
    script that starts anew instead of resuming is then seen to save an earlier step again.
    """
    chosen = [int((i + rng.random()) * len(commits) / kills) - 1 for i in range(kills)]
    if len(commits) > 2:
        chosen[-1] = max(chosen[-1], 1)
    times = [0.0, *(commit.seconds for commit in commits)]
    return [
        Trap(
            after_step=None if place < 0 else commits[place].manifest.step,
            gap_s=max(times[place + 2] - times[place + 1], 0.0),
            start_s=times[1],
            share=rng.random(),
        )
        for place in chosen
    ]


def at_once(traps: Sequence[Trap]) -> list[Trap]:
    """Return the same traps without the random while, nor what they have noted."""
    return [replace(trap, share=0.0, _due=None) for trap in traps]
