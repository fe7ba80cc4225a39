"""Who looks on at a run: nobody at a real one, preflight or parity at one that is only traced.

A session is handed its observer when it is made; whoever belongs to the run asks that one.
"""

from __future__ import annotations

from typing import Any, Protocol


class Observer(Protocol):
    """What a run asks of the one who looks on."""

    @property
    def is_watching(self) -> bool:
        """Whether the run is only looked at: it keeps no records, and leaves the user's files."""
        ...

    @property
    def folder(self) -> str:
        """Where a run that is looked at may write; it is removed afterwards."""
        ...

    def begin(self) -> bool:
        """Whether this training is the one to look at: the first one is."""
        ...

    def tell(self, **facts: Any) -> None:
        """Take down what the run says of itself; what was said first stays."""
        ...

    def end_steps(self) -> None:
        """Take note that the training steps are over."""
        ...

    def leave(self) -> None:
        """Leave the user's script: everything was seen."""
        ...

    def skips_save(self) -> bool:
        """Whether a save that comes now is left out."""
        ...


class NoObserver:
    """Nobody looks on: this is a real run."""

    is_watching = False
    folder = ""

    def begin(self) -> bool:
        """Shorten no training."""
        return False

    def tell(self, **facts: Any) -> None:
        """Take nothing down."""

    def end_steps(self) -> None:
        """Take note of nothing."""

    def leave(self) -> None:
        """Go on."""

    def skips_save(self) -> bool:
        """Let it be written."""
        return False
