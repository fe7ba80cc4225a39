"""Turn wishes into a session: one plan, one device, one world, one precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

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
from anytrain.machine.backends import capabilities, probe
from anytrain.machine.backends.base import Backend
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
        if getattr(self.plan, choice) != (moved := Choice(value, because)):
            self.plan = replace(self.plan, **{choice: moved})
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
