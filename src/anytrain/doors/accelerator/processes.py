"""What every holder of a session can say about the processes it runs in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from anytrain.core.errors import BadInput
from anytrain.doors.accelerator.options import DistributedType
from anytrain.engine.assemble.session import Session
from anytrain.engine.data.shard import split

F = TypeVar("F", bound=Callable[..., Any])


class ProcessView:
    """Rank, size and turn-taking, read from one session."""

    @property
    def _session(self) -> Session:
        raise AssertionError("each view says where its session is")

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._session.device

    @property
    def num_processes(self) -> int:
        """The number of processes of the job."""
        return self._session.world.size

    @property
    def process_index(self) -> int:
        """This process's rank in the job."""
        return self._session.world.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self._session.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the job's first process."""
        return self._session.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its machine's first process."""
        return self._session.world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the job's last process."""
        return self._session.world.rank == self._session.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._session.world.size > 1

    @property
    def distributed_type(self) -> DistributedType:
        """What kind of world this is, in HF's words."""
        kind = self._session.backend.name
        if kind in ("tpu", "xla"):
            return DistributedType.XLA
        if not self.use_distributed:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if kind == "cuda" else DistributedType.MULTI_CPU

    @property
    def backend(self) -> str | None:
        """The transport between processes; None where there is one process."""
        return self._session.world.transport

    @property
    def debug(self) -> bool:
        """Whether collectives check shapes first (ANYTRAIN_DEBUG=1)."""
        return self._session.environment.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        self._session.environment = replace(self._session.environment, debug=value)

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self._session.world.barrier(f"wait_for_everyone() in {_caller()}")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine.

        Args:
            *args: What print takes.
            **kwargs: What print takes: sep, end, file, flush.
        """
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 -- printing is what was asked for

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the job's main process through the block before the others."""
        with self._goes_first(self.is_main_process, f"main_process_first() in {_caller(3)}"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let each machine's main process through the block before the others."""
        why = f"local_main_process_first() in {_caller(3)}"
        with self._goes_first(self.is_local_main_process, why):
            yield

    @contextmanager
    def _goes_first(self, first: bool, why: str) -> Iterator[None]:
        if not first:
            self._session.world.barrier(why)
        try:
            yield
        finally:  # also after an error: the others must not wait for ever
            if first:
                self._session.world.barrier(why)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give the block this process's part of a list, tuple, dict, tensor or dataset.

        Args:
            inputs: A list, tuple, dict of lists, tensor or data set. One thing, such as a
                text, goes to every process.
            apply_padding: Whether shorter parts repeat their last item, so that all are
                equally long, as `gather` wants them.
        """
        world = self._session.world
        yield split(inputs, world.size, world.rank, pad=apply_padding)

    def on_main_process(self, function: F | None = None) -> Any:
        """Decorate a function to run on the job's main process alone.

        Args:
            function: The function. None where the decorator is written with parentheses.
        """
        return self._only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: F | None = None) -> Any:
        """Decorate a function to run on each machine's main process alone.

        Args:
            function: The function. None where the decorator is written with parentheses.
        """
        return self._only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: F | None = None) -> Any:
        """Decorate a function to run on the job's last process alone.

        Args:
            function: The function. None where the decorator is written with parentheses.
        """
        return self._only(lambda: self.is_last_process, function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on the process of the given rank alone.

        Args:
            function: The function. None where the decorator is written with parentheses.
            process_index: The rank, from 0.
        """
        rank = self._known_rank(process_index, "process_index", self.num_processes)
        return self._only(lambda: self.process_index == rank, function)

    def on_local_process(
        self, function: F | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function to run on the process of the given rank of its machine alone.

        Args:
            function: The function. None where the decorator is written with parentheses.
            local_process_index: The rank on its machine, from 0.
        """
        size = self._session.world.local_size
        rank = self._known_rank(local_process_index, "local_process_index", size)
        return self._only(lambda: self.local_process_index == rank, function)

    @staticmethod
    def _only(is_me: Callable[[], bool], function: F | None) -> Any:
        if function is None:
            return partial(ProcessView._only, is_me)

        @wraps(function)
        def here_only(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_me() else None

        return here_only

    @staticmethod
    def _known_rank(rank: int | None, what: str, size: int) -> int:
        if rank is None or rank < 0:
            raise BadInput(
                f"Cannot run on {what}={rank}.",
                why="the call does not say which process is to run the function.",
                fix=f"pass {what}= a rank from 0 to {size - 1}.",
            )
        return rank


def _caller(depth: int = 2) -> str:
    """Return file and line of whoever called the caller, to name it if a barrier hangs."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "contextlib"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
