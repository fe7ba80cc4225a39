"""Views of the current run, that can be reset as HF's state objects can.

HF's are one shared object each: reset, they are empty and say so. Scripts and tests of HF's
reset them on purpose; ours only look, so a reset is noted here.
"""

from __future__ import annotations

import threading
from typing import Any

from anytrain.compat.accelerate import refused
from anytrain.doors.accelerator import states
from anytrain.doors.accelerator.options import DistributedType
from anytrain.doors.accelerator.states import forget_run, run_now
from anytrain.engine.assemble.session import Session

__all__ = [
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "ThreadLocalSharedDict",
    "do_nothing",
    "is_initialized",
]

__getattr__ = refused.module_getattr(__name__)

_FACTS = (
    "backend",
    "debug",
    "device",
    "distributed_type",
    "fork_launched",
    "local_process_index",
    "num_processes",
    "process_index",
)
_reset: list[Session] = []


def was_reset(found: Session) -> bool:
    """Whether this run was the current one when the state was last reset."""
    return any(found is other for other in _reset)


def _note_reset() -> None:
    found = forget_run()
    if found is not None:
        _reset[:] = [found]


class _SharedState:
    """What HF's classes keep in one dict, read from the current run; empty where there is none."""

    def __get__(self, instance: Any, owner: type[Any]) -> dict[str, Any]:
        found = run_now()
        if found is None:
            return {}
        view = PartialState._of(found)
        return {
            "_cpu": found.device.type == "cpu",
            **{name: getattr(view, name) for name in _FACTS},
        }


class _ResettableState:
    """What HF's two state classes share beyond ours."""

    _shared_state = _SharedState()

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the current run; an Accelerator that belongs to it says so from now on."""
        _note_reset()

    @property
    def distributed_type(self) -> DistributedType:
        """What kind of world this is; HF's tests pretend another."""
        assigned: DistributedType | None = self.__dict__.get("distributed_type")
        found: DistributedType = super().distributed_type  # type: ignore[misc]  # the view's, next in line
        return found if assigned is None else assigned

    @distributed_type.setter
    def distributed_type(self, value: DistributedType) -> None:
        self.__dict__["distributed_type"] = value


class PartialState(_ResettableState, states.PartialState):
    """Where this process stands, before or beside an Accelerator."""


class AcceleratorState(_ResettableState, states.AcceleratorState):
    """Where this process stands, with its precision."""

    deepspeed_plugins = None
    device_mesh = None
    parallelism_config = None
    torch_tp_plugin = None


class GradientState(states.GradientState):
    """Where the loop stands between two updates."""

    _shared_state = _SharedState()


def is_initialized() -> bool:
    """Whether there is a current run."""
    return run_now() is not None


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Return None, whatever is passed."""


class ThreadLocalSharedDict(threading.local):
    """A dict of its own for each thread, held by a class attribute."""

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[Any, Any] = {}

    def __get__(self, obj: Any, objtype: Any = None) -> dict[Any, Any]:
        return self._storage

    def __set__(self, obj: Any, value: dict[Any, Any]) -> None:
        self._storage = value
