"""The processes of one job, seen from one of them.

INVARIANT: a world of one obeys the same laws as a world of many, so callers never test the size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, TypeVar

import torch

from anytrain.core import environment
from anytrain.core.errors import WrongOrder

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "max"]


class Board(Protocol):
    """A key-value side channel among the ranks that never touches a device."""

    def post(self, key: str, value: str) -> None:
        """Publish a value for every rank to read."""

    def read(self, key: str) -> str | None:
        """Return what was posted under the key, or None; never wait."""


class World(Protocol):
    """Rank, size, and the collective operations."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def transport(self) -> str | None:
        """gloo, nccl, tpu_dist; None in a world of one."""

    @property
    def board(self) -> Board: ...

    def reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return the sum, mean or maximum over the ranks, on every rank.

        Booleans are counted; the mean of whole numbers is a float.
        """

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor (equal shapes), joined along the first dimension."""

    def gather_object(self, value: T) -> list[T]:
        """Return every rank's value, in rank order."""

    def broadcast(self, value: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return `source`'s tensor on every rank; shapes must agree."""

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return `source`'s value on every rank."""

    def barrier(self, why: str) -> None:
        """Wait for every rank; `why` is shown if one of them does not come."""

    def muster(self, what: str) -> str | None:
        """Return None once every rank has come to this call; else say where the others are.

        Then only the main process acts: a script may make such a call there alone.
        """

    @property
    def is_watched(self) -> bool:
        """Whether somebody reads what is marked."""

    def mark(self, step: int, doing: str) -> None:
        """Leave word of where this rank is, for whoever explains its death or its stall."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Leave word inside the block that this rank waits there for the others."""

    @property
    def carrier(self) -> Any:
        """The process group that carries the device's tensors; None: torch's first one."""

    def close(self) -> None:
        """Leave the job; a world of one has nothing to leave."""


class LocalBoard:
    """The board of a world of one."""

    def __init__(self) -> None:
        self._posted: dict[str, str] = {}

    def post(self, key: str, value: str) -> None:
        self._posted[key] = value

    def read(self, key: str) -> str | None:
        return self._posted.get(key)


class Solo:
    """The world of one."""

    rank = 0
    local_rank = 0
    size = 1
    local_size = 1
    transport = None
    carrier = None

    def __init__(self, mark: Callable[[int, str], None] | None = None) -> None:
        self.board: Board = LocalBoard()
        self._mark = mark
        self.is_watched = mark is not None

    def reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return the value: the sum, mean and maximum over one rank.

        As among many, booleans are counted and the mean of whole numbers is a float.
        """
        if value.dtype is torch.bool and op != "max":
            value = value.long()
        if op == "mean" and not (value.is_floating_point() or value.is_complex()):
            return value / 1
        return value.clone()

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value; a scalar becomes one element, as it would among many."""
        return value.clone().reshape(1) if value.ndim == 0 else value.clone()

    def gather_object(self, value: T) -> list[T]:
        """Return the value in a list."""
        return [value]

    def broadcast(self, value: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return the value."""
        return value

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return the value."""
        return value

    def barrier(self, why: str) -> None:
        """Return at once: everyone is here."""

    def muster(self, what: str) -> str | None:
        """Return None: everyone is here."""
        return None

    def mark(self, step: int, doing: str) -> None:
        """Leave word for the launcher, if there is one: nobody else watches a world of one."""
        if self._mark is not None:
            self._mark(step, doing)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Do nothing: there is nobody to wait for."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _solo_here, ()


class Foreign:
    """The world of one that came with an object into a process of several: nobody may use it.

    Whoever did would train by itself, and believe that it is alone. To prepare such an object
    anew gives it this process's own world.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise WrongOrder(
            "An Accelerator, or what one has prepared, was made before the processes were "
            "launched and is used in one of them.",
            why="it knows of one process, so each would train by itself and take itself for the "
            "main one.",
            fix="make the Accelerator inside the function that is launched, and prepare model, "
            "optimizer and loaders there.",
        )


def _solo_here() -> Solo | Foreign:
    """Return the world of one, for whatever was pickled with it."""
    return Solo() if environment.read().place.size == 1 else Foreign()
