"""`PartialState`, `AcceleratorState` and `GradientState`: views of the current run.

They hold nothing. A new run replaces what they see; `end_training` clears it. What every holder
of a session can say about the processes it runs in is `ProcessView`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from anytrain.core.errors import BadInput, RunIsOver
from anytrain.core.plan import Wishes, wish
from anytrain.doors.accelerator.options import DistributedType, GradientAccumulationPlugin, RNGType
from anytrain.doors.accelerator.unsupported import refuse_plugins
from anytrain.engine import rng
from anytrain.engine.assemble import current
from anytrain.engine.assemble.session import Session, SessionOptions, session
from anytrain.engine.data.shard import split
from anytrain.engine.prepared.walk import Cursor

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


def live_session(wishes: Wishes | None = None, options: SessionOptions | None = None) -> Session:
    """Return the current run's session; open one where there is none."""
    found = current.get()
    if found is None:
        found = session(wishes or Wishes(), options)
        current.take(found)
    return found


def run_now() -> Session | None:
    """Return the current run's session, or None."""
    return current.get()


def forget_run() -> Session | None:
    """Clear the current run; return the session that it was."""
    found = current.get()
    current.clear()
    return found


def run_is_over(view: str, name: str | None = None) -> RunIsOver:
    """Return the error for a view whose run has ended."""
    asked = name or sys._getframe(2).f_code.co_name
    return RunIsOver(
        f"`{view}` object has no attribute `{asked}`. "
        f"This happens if `{view}._reset_state()` or end_training() has ended its run.",
        why="it is a view of the current run, and there is none.",
        fix=f"make a new Accelerator() or {view}().",
    )


class _View(ProcessView):
    """A view of the current run, or of the run it was given."""

    _own: Session | None = None

    @property
    def _session(self) -> Session:
        found = self._own or current.get()
        if found is None:
            raise run_is_over(type(self).__name__)
        return found

    @property
    def initialized(self) -> bool:
        """Whether there is a run to show."""
        return (self._own or current.get()) is not None

    @property
    def fork_launched(self) -> bool:
        """Whether the processes were forked: anytrain starts fresh ones."""
        return False

    @classmethod
    def _of(cls, own: Session) -> Any:
        view = cls.__new__(cls)
        view._own = own
        return view

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the current run."""
        forget_run()

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the job's process group."""
        self._session.world.close()

    def __repr__(self) -> str:
        state = self._session
        return (
            f"Distributed environment: {self.distributed_type}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {state.device}\n"
            f"Mixed precision type: {state.plan.precision}\n"
        )


class PartialState(_View):
    """Where this process stands, before or beside an Accelerator."""

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        cpu = kwargs.pop("_cpu", cpu)
        live_session(
            Wishes(device=wish("cpu" if cpu else None, "argument cpu=True")),
            SessionOptions(process_group=kwargs),
        )

    @property
    def default_device(self) -> Any:
        """The device that a process without peers would take."""
        return self._session.device

    def set_device(self) -> None:
        """Make this process's device the current one."""
        self._session.backend.device(self._session.world.local_rank)


class AcceleratorState(_View):
    """Where this process stands, with its precision."""

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_plugins(
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
        )
        live_session(
            Wishes(
                device=wish("cpu" if cpu else None, "argument cpu=True"),
                precision=wish(mixed_precision, "argument mixed_precision"),
                compile=wish(getattr(dynamo_plugin, "backend", None), "argument dynamo_plugin"),
            ),
            SessionOptions(process_group=kwargs),
        )

    @property
    def mixed_precision(self) -> str:
        """The precision in force: no, bf16 or fp16."""
        return self._session.plan.precision.value

    @property
    def plan(self) -> Any:
        """Everything that was decided, each with its reason."""
        return self._session.plan

    is_fsdp2 = False
    deepspeed_plugin = None

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Refuse: there is no DeepSpeed here."""
        refuse_plugins(deepspeed_plugin=name)

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Refuse: there is no DeepSpeed here."""
        refuse_plugins(deepspeed_plugin=name or "deepspeed")


class GradientState:
    """Where the loop stands between two updates."""

    _own: Cursor | None = None

    def __init__(
        self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        cursor = live_session().cursor
        if gradient_accumulation_plugin is not None:
            plugin = gradient_accumulation_plugin
            cursor.accumulation = replace(
                cursor.accumulation,
                num_steps=plugin.num_steps or 1,
                adjust_scheduler=plugin.adjust_scheduler,
                sync_with_dataloader=plugin.sync_with_dataloader,
                sync_each_batch=plugin.sync_each_batch,
            )

    @classmethod
    def _of(cls, cursor: Cursor) -> GradientState:
        view = cls.__new__(cls)
        view._own = cursor
        return view

    @property
    def _cursor(self) -> Cursor:
        return self._own or live_session().cursor

    @property
    def initialized(self) -> bool:
        """Whether there is a run to show."""
        return (self._own or current.get()) is not None

    @property
    def sync_gradients(self) -> bool:
        """Whether this batch ends an update."""
        return self._cursor.sync

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._cursor.sync = value

    def _set_sync_gradients(self, value: bool) -> None:
        self._cursor.sync = value

    @property
    def num_steps(self) -> int:
        """How many batches make one update."""
        return self._cursor.accumulation.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count the batches between updates."""
        return self._cursor.accumulation.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader always ends an update."""
        return self._cursor.accumulation.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """How many batches make one update, and the options that are not at their defaults."""
        steps = self._cursor.accumulation
        usual = {"adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False}
        now = {name: getattr(steps, name) for name in usual}
        changed = {name: now[name] for name in usual if now[name] != usual[name]}
        return {"num_steps": steps.num_steps, **changed}

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the loop is at the loader's last batch."""
        return self._cursor.at_end

    @property
    def remainder(self) -> int:
        """How many samples of the last round are no repeats; -1 where nobody knows."""
        return self._cursor.remainder

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader being walked."""
        return self._cursor.loader

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being walked."""
        return self._cursor.loader is not None

    @property
    def dataloader_references(self) -> list[Any]:
        """None, then the loaders being walked, outermost first."""
        return [None, *self._cursor.open_loaders]

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether gradients were averaged: they are, in backward."""
        return True

    @staticmethod
    def _reset_state() -> None:
        """Forget where the loop stands."""
        found = current.get()
        if found is not None:
            found.cursor = Cursor(type(found.cursor.accumulation)())

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed python, numpy and torch; `device_specific` adds the rank."""
    offset = live_session().world.rank if device_specific else 0
    rng.seed_everything(seed + offset, deterministic=deterministic)


def synchronize_rng_states(rng_types: list[str | RNGType], generator: Any = None) -> None:
    """Give every rank the main process's generator states."""
    found = live_session()
    kinds = [str(kind) for kind in rng_types]
    rng.share(kinds, found.world, found.backend, found.device, generator)
