"""Turn wishes into a session: one plan, one device, one world, one precision.

And tell of it: what is on record of a run is known here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil
import torch
from torch import nn

from anytrain._version import __version__
from anytrain.core import environment
from anytrain.core.clock import Ledger
from anytrain.core.environment import Environment
from anytrain.core.errors import BadInput
from anytrain.core.facts import Capabilities, JobFacts, MemoryForecast
from anytrain.core.observer import NoObserver, Observer
from anytrain.core.plan import (
    Choice,
    Plan,
    Revision,
    Wishes,
    check_downcast,
    check_precision,
    check_processes,
    is_yes,
    resolve,
    whole_number,
)
from anytrain.engine import precision as precisions
from anytrain.engine.assemble.fast_room import fast_room
from anytrain.engine.assemble.input_errors import explain_uncaught
from anytrain.engine.data.compiled_shapes import Graphs
from anytrain.engine.precision import Precision
from anytrain.engine.prepared.model import values_unread
from anytrain.engine.prepared.walk import Accumulation, Cursor
from anytrain.engine.recording import fingerprint
from anytrain.engine.recording.timesheet import Facts, Timesheet
from anytrain.machine.backends import capabilities, probe
from anytrain.machine.backends.base import Backend
from anytrain.machine.backends.cpu import cores_each, num_cores, processor
from anytrain.machine.parallel import torch_dist
from anytrain.machine.parallel.world import World
from anytrain.machine.strategies import table as strategies
from anytrain.machine.strategies.base import Strategy

DEFAULT_STALL_S = 60.0
_observer: Observer = NoObserver()
"""Who looks on at the runs that begin now."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Details of a session that no plan decides."""

    accumulation: Accumulation = field(default_factory=Accumulation)
    process_group: Mapping[str, Any] = field(default_factory=dict)
    scaler: Mapping[str, Any] = field(default_factory=dict)
    autocast: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Session:
    """Everything one run stands on."""

    plan: Plan
    backend: Backend
    device: torch.device
    world: World
    strategy: Strategy = field(compare=False)
    precision: Precision
    cursor: Cursor = field(compare=False)
    environment: Environment
    end_step: Callable[[], None] | None = field(default=None, compare=False)
    """Ends a step's graph and starts it; None where the device does not trace."""
    revisions: list[Revision] = field(default_factory=list)
    planned: Plan = field(init=False)
    """The plan as it was before any revision."""

    def __post_init__(self) -> None:
        self.planned = self.plan

    ledger: Ledger = field(default_factory=Ledger, compare=False)
    graphs: Graphs | None = field(default=None, compare=False)
    """What was compiled; None where nothing compiles."""
    machine: Capabilities | None = field(default=None, compare=False)
    """What the device was found to do; None where nobody tried."""
    observer: Observer = field(default_factory=NoObserver, compare=False)
    memory: MemoryForecast | None = field(default=None, compare=False)
    """What each rank will hold of model and optimizer; None as long as they are not known."""

    def revise(self, choice: str, value: str, because: str, step: int = 0) -> None:
        """Move one of the plan's choices, and keep a record of it; the same again is no news."""
        now: Choice = getattr(self.plan, choice)
        if (now.value, now.because) != (value, because):
            self.plan = replace(self.plan, **{choice: Choice(value, because)})
            self.revisions.append(Revision(choice, value, because, step))


def session(wishes: Wishes, options: SessionOptions | None = None) -> Session:
    """Decide, then open the device and join the world."""
    options = options or SessionOptions()
    env = environment.read()
    wishes = wishes.over(env.wishes)
    check_precision(wishes.precision)
    accumulation = whole_number(wishes.accumulation, "gradient_accumulation_steps", 1)
    backend = probe.choose(wishes.device)
    check_processes(backend.name, backend.process_group, env.place.size)  # before it is loaded
    check_downcast(wishes.downcast_bf16, backend.name)
    if is_yes(wishes.downcast_bf16):
        environment.downcast()
    device = backend.device(env.place.local_rank)
    explain_uncaught(backend)
    machine = backend.capabilities(device)
    plan = resolve(wishes, machine, JobFacts(), env.place.size)
    world = _world(env, backend, device, wishes, options.process_group)
    if capabilities.wants_bf16_gain(wishes, machine):  # one rank measures, so that all decide alike
        gain = capabilities.bf16_gain(machine.name) if world.rank == 0 else None
        machine = replace(machine, bf16_gain=world.broadcast_object(gain))
    # Again: of what was measured, and of a process group that the script made by hand.
    plan = resolve(wishes, machine, JobFacts(), world.size)
    cursor = Cursor(replace(options.accumulation, num_steps=int(accumulation.value)))
    graphs = _graphs(backend, world)
    end_step = backend.end_step if machine.traces else None
    if end_step is not None and graphs is not None:
        end_step = graphs.watched(end_step)
    cursor.end_step = end_step
    return Session(
        plan=plan,
        backend=backend,
        device=device,
        world=world,
        strategy=strategies.build(plan.strategy.value, world, device),
        precision=precisions.build(
            plan.precision.value,
            device.type,
            scaler_options=options.scaler,
            autocast_options=options.autocast,
        ),
        cursor=cursor,
        environment=env,
        end_step=end_step,
        graphs=graphs,
        machine=machine,
        observer=_observer,
    )


def observer() -> Observer:
    """Return who will look on at the next session: for settings that come before one is made."""
    return _observer


@contextmanager
def observed_by(found: Observer) -> Iterator[None]:
    """Hand this observer to each session that is made in the block."""
    global _observer
    _observer, before = found, _observer
    try:
        yield
    finally:
        _observer = before


def _graphs(backend: Backend, world: World) -> Graphs | None:
    """Return what counts a device's graphs; None where it compiles none."""
    if backend.compilations() is None:
        return None
    return Graphs(backend.compilations, is_main=world.rank == 0)


def _world(
    env: Environment,
    backend: Backend,
    device: torch.device,
    wishes: Wishes,
    options: Mapping[str, Any],
) -> World:
    timeout = options.get("timeout")
    return torch_dist.join(
        env.place,
        options.get("backend") or str(backend.process_group),
        device,
        timeout_s=timeout.total_seconds() if timeout is not None else None,
        stall_s=_stall_s(wishes),
        init_method=options.get("init_method"),
        beats=env.beats,
    )


def _stall_s(wishes: Wishes) -> float:
    if wishes.stall_s is None:
        return DEFAULT_STALL_S
    try:
        return float(wishes.stall_s.value)
    except ValueError:
        raise BadInput(
            f"Cannot wait for a stalled rank for {wishes.stall_s}.",
            why="it is a number of seconds; 0 waits forever.",
            fix="set ANYTRAIN_STALL_S=60, or pass --stall_timeout 60.",
        ) from None


@contextmanager
def replacements(session: Session) -> Iterator[None]:
    """Replace in the block what models compute better otherwise on the session's device."""
    room = fast_room() if session.device.type == "cuda" else None
    with ExitStack() as put_back:
        if session.end_step is not None:
            put_back.enter_context(values_unread(session.device.type))
        if room is not None:
            put_back.enter_context(room.attend_quickly(session.device))
        yield


def timesheet(
    session: Session, folder: str | os.PathLike[str], *, begin: Facts, standing: Facts
) -> Timesheet:
    """Return a run's timesheet; what a session knows of itself is added to the door's facts."""
    return Timesheet(
        folder,
        session.ledger,
        begin=lambda: {**session_facts(session), **begin()},
        standing=lambda: {**_standing_facts(session), **standing()},
        rank=session.world.rank,
    )


def session_facts(session: Session) -> Mapping[str, Any]:
    """Return what is known of a session when a run begins."""
    return {
        "plan": {name: asdict(choice) for name, choice in session.planned.reasons().items()},
        "device": str(session.device),
        "world_size": session.world.size,
        "num_cores": cores_each(session.environment.place.local_size),
        "versions": {"anytrain": __version__, "torch": str(torch.__version__)},
    }


def start_facts(
    session: Session, model: nn.Module | None, datasets: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is written down of a run's start: plan, hardware, data, model."""
    return {
        "plan": session_facts(session)["plan"],
        "hardware": _hardware_facts(session),
        "data": {
            name: fingerprint.describe(found)
            for name, found in datasets.items()
            if found is not None
        },
        "model": None if model is None else _model_facts(model),
    }


def _hardware_facts(session: Session) -> dict[str, Any]:
    machine, is_host = session.machine, session.device.type == "cpu"
    return {
        "cpu": processor(),
        "num_cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "backend": session.backend.name,
        "device": session.device.type,
        "device_name": None if machine is None else machine.name,
        "device_memory_bytes": None if machine is None or is_host else machine.memory_bytes,
        "num_devices": 1 if is_host else session.world.size,
        "num_processes": session.world.size,
    }


def _model_facts(model: nn.Module) -> dict[str, Any]:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    begun_from = getattr(getattr(model, "config", None), "_name_or_path", None)
    return {
        "name": type(model).__name__,
        "from": begun_from or None,
        "num_parameters": sum(size for size, _ in sizes),
        "num_trainable": sum(size for size, is_trained in sizes if is_trained),
    }


def _standing_facts(session: Session) -> Mapping[str, Any]:
    graphs, memory = session.graphs, session.backend.memory(session.device)
    compiled = {} if graphs is None else {"graphs": graphs.num_compiled, "late_shapes": graphs.late}
    return {
        **compiled,
        "used_bytes": memory.used_bytes,
        "peak_bytes": memory.peak_bytes,
        "revisions": [asdict(revision) for revision in session.revisions],
    }
