"""Errors that say what happened, why, and what to do.

`why` and `fix` are required, so a lazy message does not type-check. Each class is also the
built-in error that people already catch for that kind of mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anytrain.core.text import printable


class AnytrainError(Exception):
    """Say what happened, why, and what to do about it."""

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        # Names of files, metrics and models are in it, which others chose.
        return printable(f"{self.what}\n  why: {self.why}\n  fix: {self.fix}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.why, self.fix)


def add_to_message(error: BaseException, text: str) -> None:
    """Put a line into an error's own message, so that whoever prints `str(error)` shows it.

    An error that makes its message in a way of its own gets a note instead.

    >>> error = ValueError("no such row")
    >>> add_to_message(error, "It was raised for sample 3.")
    >>> print(error)
    no such row
    It was raised for sample 3.
    """
    if isinstance(error, AnytrainError):
        error.why = f"{error.why} {text}"
    elif isinstance(error, KeyError):
        error.args = (_AsItIs(f"{error}\n{text}"),)
    elif isinstance(error, OSError) and error.strerror is not None:
        error.strerror = f"{error.strerror} ({text.rstrip('.')})"
    elif len(error.args) < 2:
        error.args = (f"{error}\n{text}" if str(error) else text,)
    if text.rstrip(".") not in str(error):
        error.add_note(text)


@contextmanager
def raised_by(whom: str) -> Iterator[None]:
    """Name whose code the block runs in the message of an error that it raises."""
    try:
        yield
    except AnytrainError:
        raise
    except Exception as error:
        add_to_message(error, f"Raised by {whom}.")
        raise


class _AsItIs(str):
    """A text that a KeyError shows as it is, and not as it would be written in code."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _rebuild(kind: type[AnytrainError], what: str, why: str, fix: str) -> AnytrainError:
    return kind(what, why=why, fix=fix)


class BadInput(AnytrainError, ValueError):
    """An argument, option or variable has a value that cannot work."""


class ShapesDiffer(BadInput):
    """Ranks hold tensors of different shapes where they must agree."""


class OutOfRange(BadInput, IndexError):
    """A label, token id or position lies outside the table that it is looked up in."""


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


class WorkerLost(AnytrainError, RuntimeError):
    """A process that loads data died."""


class DiskFull(AnytrainError, OSError):
    """A file that holds what memory should not finds no room."""


class NotAFile(AnytrainError, OSError):
    """A pipe, a socket, a device or a folder has the name of a file; to open it may never end."""


class CheckpointError(AnytrainError, RuntimeError):
    """A checkpoint could not be written, or must not be loaded."""


class NoCheckpoint(CheckpointError, ValueError):
    """There is no checkpoint where one was asked for; HF's libraries raise a ValueError there."""


class HubError(AnytrainError, ConnectionError):
    """The model hub could not be reached, or refused."""


class Notice(UserWarning):
    """Something the user should know and need not stop for."""

    def __str__(self) -> str:
        return printable(super().__str__())
