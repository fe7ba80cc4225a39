"""Keep fewer activations, so that the batch that was asked for fits.

Blocks are checkpointed one level at a time: none, every other, all. What a step learns stays the
same: a block that is computed again draws the same dropout.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from anytrain.engine.step.blocks import is_free, repeated, set_checkpointed


class Activations:
    """Which of a model's repeated blocks keep only their inputs for backward.

    >>> activations = Activations(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    >>> activations.fewer(), activations.num_checkpointed
    (True, 2)
    >>> activations.fewer(), activations.fewer(), activations.num_checkpointed
    (True, False, 4)
    """

    def __init__(
        self, model: nn.Module, tell: Callable[[int, int], None] = lambda number, total: None
    ) -> None:
        self._tell = tell
        """Told how many blocks of how many are checkpointed from here on."""
        self._blocks = tuple(filter(is_free, repeated(model)))
        self._every = 0

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    @property
    def num_checkpointed(self) -> int:
        """How many of them are computed again in backward."""
        return len(self._blocks[:: self._every]) if self._every else 0

    def fewer(self) -> bool:
        """Checkpoint more blocks; False where all are."""
        if self._every == 1 or not self._blocks:
            return False
        self._every = 1 if self._every else 2
        for block in self._blocks[:: self._every]:
            set_checkpointed(block, True)
        self._tell(self.num_checkpointed, self.num_blocks)
        return True

    def restore(self) -> None:
        """Let every block keep its activations again."""
        self._every = 0
        for block in self._blocks:
            set_checkpointed(block, False)
