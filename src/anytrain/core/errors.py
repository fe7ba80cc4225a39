"""Errors that say what happened, why, and what to do.

`why` and `fix` are required, so a lazy message does not type-check. Each class is also the
built-in error that people already catch for that kind of mistake.
"""

from __future__ import annotations


class AnytrainError(Exception):
    """Say what happened, why, and what to do about it."""

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.why, self.fix)


def _rebuild(kind: type[AnytrainError], what: str, why: str, fix: str) -> AnytrainError:
    return kind(what, why=why, fix=fix)


class BadInput(AnytrainError, ValueError):
    """An argument, option or variable has a value that cannot work."""


class ShapesDiffer(BadInput):
    """Ranks hold tensors of different shapes where they must agree."""


class BadType(AnytrainError, TypeError):
    """An argument has a type that cannot work."""


class Unsupported(AnytrainError, NotImplementedError):
    """anytrain knows the wish and does not do it."""


class DeviceBroken(AnytrainError, RuntimeError):
    """An accelerator is present and fails; taking the CPU instead would hide it."""


class WrongOrder(AnytrainError, RuntimeError):
    """A call came before the one it needs, or after the one that ends it."""


class RunIsOver(WrongOrder, AttributeError):
    """A view of a run was asked about it after it had ended."""


class NothingFits(AnytrainError, RuntimeError):
    """Not even the smallest batch fits the device's memory."""


class NotFinite(AnytrainError, FloatingPointError):
    """A loss or a gradient is NaN or infinite, and the run stops before it does harm."""


class PeerLost(AnytrainError, RuntimeError):
    """Another rank died, or stopped answering."""


class DiskFull(AnytrainError, OSError):
    """A file that holds what memory should not finds no room."""


class CheckpointError(AnytrainError, RuntimeError):
    """A checkpoint could not be written, or must not be loaded."""


class NoCheckpoint(CheckpointError, ValueError):
    """There is no checkpoint where one was asked for; HF's libraries raise a ValueError there."""


class HubError(AnytrainError, ConnectionError):
    """The model hub could not be reached, or refused."""


class Notice(UserWarning):
    """Something the user should know and need not stop for."""
