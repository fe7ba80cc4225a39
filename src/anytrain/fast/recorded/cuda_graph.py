"""Record work as a CUDA graph, and replay it.

INVARIANT: recording runs nothing. It changes no tensor that the work writes to, and the random
numbers of a replay are those that the work would have drawn if it had been run in its place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils import checkpoint

from anytrain.core import patches
from anytrain.fast.recorded.numbers import numbers_on_device


@dataclass(slots=True)
class Draws:
    """How far the generator had moved at each checkpointed block of a run, and at its end."""

    marks: list[int] = field(default_factory=list)
    total: int = 0


class CudaGraphs:
    """Recordings on one GPU, all in one pool of memory."""

    num_abandoned: ClassVar[int] = 0
    """How often a recording failed in this process: each gave the generator another state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._born = CudaGraphs.num_abandoned
        self.problem: str | None = None
        """Why recordings cannot be trusted."""
        self._generator: torch.Generator = torch.cuda.default_generators[device.index or 0]

    @contextmanager
    def watching(self) -> Iterator[Draws]:
        """Note what the block draws while it runs: a recording of it must know beforehand."""
        found, first = Draws(), self._generator.get_offset()
        states = checkpoint.get_device_states

        def noted(*inputs: Any) -> Any:
            found.marks.append(self._generator.get_offset() - first)
            return states(*inputs)

        try:
            with patches.replaced("checkpoint draws", checkpoint, get_device_states=noted):
                yield found
        finally:
            found.total = self._generator.get_offset() - first

    def record(
        self, work: Callable[[], Any], draws: Draws | None
    ) -> tuple[Callable[[], None], Any]:
        """Return what replays the work, and the tensors that each replay writes its results to.

        `draws` is what the work drew when it was watched; None where it was not. A recording that
        fails leaves the generator as it was; what the work has done to Python's objects until then
        is the caller's to undo.
        """
        graph: Any = torch.cuda.CUDAGraph()
        # The recomputation of a checkpointed block draws from a twin of the generator that
        # stands where the block began.
        marks = draws.marks if draws is not None and draws.total else []
        twins = [torch.Generator(self._device) for _ in marks]
        for twin in twins:
            graph.register_generator_state(twin)
        before = self._generator.initial_seed(), self._generator.get_offset()
        # torch has few streams, and cuBLAS a workspace for each: it may lie in another one's pool.
        _let_go_of_workspaces()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with (
            torch.cuda.stream(self._stream),
            self._drawing_from(None if draws is None else twins),
            numbers_on_device(),
            _no_collection(),
        ):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                results = work()
                graph.capture_end()
            except BaseException:
                self._abandon(graph, *before)
                raise
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

        def replay() -> None:
            for twin, mark in zip(twins, marks, strict=True):
                twin.manual_seed(self._generator.initial_seed())
                twin.set_offset(self._generator.get_offset() + mark)
            first = self._generator.get_offset()
            graph.replay()
            if marks and draws is not None:
                self._compare(self._generator.get_offset() - first, draws.total)

        return replay, results

    def _compare(self, drawn: int, expected: int) -> None:
        """See that a recording draws as much as the step did that it was planned from.

        Else checkpointed blocks begin somewhere else than was reckoned.
        """
        if drawn != expected:
            self.problem = (
                "a step with checkpointed blocks draws other random numbers when it is recorded"
            )

    def place(self) -> tuple[int, int]:
        """Return where the generator stands."""
        return self._generator.initial_seed(), self._generator.get_offset()

    @contextmanager
    def drawing_again(self, place: tuple[int, int]) -> Iterator[None]:
        """Let the block draw the numbers that were drawn from that place on."""
        here = self.place()
        self._stand(place)
        try:
            yield
        finally:
            self._stand(here)

    def _stand(self, place: tuple[int, int]) -> None:
        seed, offset = place
        self._generator.manual_seed(seed)
        self._generator.set_offset(offset)

    def is_current(self) -> bool:
        """Whether the generator still has the state that this one's recordings draw from."""
        return self._born == CudaGraphs.num_abandoned

    def renew(self) -> None:
        """Take another pool: one whose graphs are all gone cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()
        self._born = CudaGraphs.num_abandoned

    def release(self) -> None:
        """Give back the memory that running the work op by op has left in the cache."""
        _let_go_of_workspaces()
        free, total = torch.cuda.mem_get_info(self._device)
        if free < total / 2:  # to give it back takes time, and nobody else may want it
            with suppress(RuntimeError):  # a recording that failed elsewhere may forbid it
                torch.cuda.empty_cache()

    def _abandon(self, graph: Any, seed: int, offset: int) -> None:
        """End a recording that failed.

        A generator's state that took part in one is stuck in it: it gets another, like the first.
        """
        with suppress(RuntimeError):
            graph.capture_end()
        # The allocator may still wait for the end; where it does not, there is nothing to end.
        with suppress(AttributeError, RuntimeError, TypeError):
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
        CudaGraphs.num_abandoned += 1
        self.renew()
        fresh = torch.Generator(self._device)
        fresh.manual_seed(seed)
        fresh.set_offset(offset)
        self._generator.graphsafe_set_state(fresh)

    @contextmanager
    def _drawing_from(self, twins: list[torch.Generator] | None) -> Iterator[None]:
        """Let checkpointed blocks of the recorded work switch generators instead of states.

        A state is a number on the host, which a recording would freeze. Without twins to switch
        to, a block would draw other numbers the second time.
        """
        count = iter(range(1_000_000))

        def take(*inputs: Any) -> Any:
            if twins is None:
                raise RuntimeError("a checkpointed block, of a shape that has not run op by op")
            return [], [next(count)]

        def put(devices: Any, states: Any, **options: Any) -> None:
            if twins:
                self._generator.graphsafe_set_state(twins[states[0]])

        @contextmanager
        def fork(*args: Any, enabled: bool = True, **options: Any) -> Iterator[None]:
            own, host = self._generator.graphsafe_get_state(), torch.get_rng_state()
            try:
                yield
            finally:
                if enabled:
                    self._generator.graphsafe_set_state(own)
                    torch.set_rng_state(host)

        states: dict[str, Any] = {"get_device_states": take, "set_device_states": put}
        with (
            patches.replaced("checkpoint draws", checkpoint, **states),
            patches.replaced("checkpoint draws", torch.random, fork_rng=fork),
        ):
            yield


def _let_go_of_workspaces() -> None:
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep garbage where it is: to free a graph or a tensor of another stream ends a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
