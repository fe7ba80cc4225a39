"""The prepared optimizer and learning-rate scheduler.

The optimizer updates at the end of an accumulated step, and only by finite gradients; the schedule
moves only when the optimizer does. Where the device decides on an update it counts the schedule's
position too: the host runs the user's scheduler ahead and writes each position's rate into a table,
and nobody waits to learn of a skipped update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anytrain.engine.prepared.walk import Cursor
from anytrain.engine.step.guard import Guard
from anytrain.machine.parallel.world import World

_HOW = ("fused", "foreach", "capturable", "differentiable")


class PreparedOptimizer(Optimizer):
    """A prepared optimizer; its parameters and state are the optimizer's below."""

    def __init__(self, optimizer: Optimizer, cursor: Cursor, guard: Guard, world: World) -> None:
        # Optimizer.__init__ is not called: `optimizer` holds the parameters, this one decides.
        self.optimizer = optimizer
        self.guard = guard
        self._cursor = cursor
        self._world = world

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, if this batch ends an accumulated step and the gradient is finite."""
        if not self._cursor.sync:
            return None
        result = self.guard.update(self.optimizer, closure)
        self.count_update()
        return result

    def count_update(self) -> None:
        """Note that an update is through, for the loop and for the other ranks."""
        self._cursor.updates += 1
        if self._world.is_watched:
            self._world.mark(self._cursor.updates, "between steps")

    def belongs_to(self, cursor: Cursor) -> bool:
        """Whether it follows this run's loop."""
        return self._cursor is cursor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, if this batch ends an accumulated step."""
        if not self._cursor.sync:
            return
        if set_to_none and type(self.optimizer).zero_grad is Optimizer.zero_grad:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        if self._cursor.end_step is not None:
            self._cursor.end_step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was left out; reads the device."""
        return self.guard.was_skipped()

    @property
    def state(self) -> Any:
        """The optimizer's own state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's own defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer below."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state, with a rate kept on the device as a number."""
        state = self.optimizer.state_dict()
        for group in state["param_groups"]:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"] = float(group["lr"])
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore the optimizer's own state.

        How the update runs (fused or not) stays this device's: a checkpoint may come from another.
        """
        groups = zip(state_dict["param_groups"], self.optimizer.param_groups, strict=False)
        kept = [
            {**saved, **{name: own[name] for name in _HOW if name in own}} for saved, own in groups
        ]
        self.optimizer.load_state_dict({**state_dict, "param_groups": kept})

    def train(self) -> None:
        """Enter training mode, for optimizers that have one."""
        getattr(self.optimizer, "train", _nothing)()

    def eval(self) -> None:
        """Enter evaluation mode, for optimizers that have one."""
        getattr(self.optimizer, "eval", _nothing)()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet set: a copy or an unpickled one is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


def _nothing() -> None:
    """Do nothing."""


def fuse(optimizer: Optimizer, device: torch.device) -> bool:
    """Make torch's own optimizer fused where the user left the choice to torch.

    A fused update skips a non-finite step on the device; other forms need the host to look.
    Return whether the optimizer can be told on the device.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return True
    groups = optimizer.param_groups
    undecided = all(
        "fused" in group
        and group["fused"] is None
        and group.get("foreach") is None
        and not group.get("capturable")
        and not group.get("differentiable")
        for group in groups
    )
    fits = all(
        parameter.device.type == device.type and parameter.is_floating_point()
        for group in groups
        for parameter in group["params"]
    )
    if not (undecided and fits and type(optimizer).step.__module__.startswith("torch.optim")):
        return False
    for group in groups:
        group["fused"] = True
    fused: Any = optimizer
    fused._step_supports_amp_scaling = True
    fused._need_device_dtype_check_for_fused = True
    if optimizer.state:  # a restored optimizer keeps its step count on the host until it is told
        optimizer.load_state_dict(optimizer.state_dict())
    return True


def follow(optimizer: Optimizer, moved: Mapping[int, torch.nn.Parameter]) -> None:
    """Point the optimizer, with what it remembers, at parameters that placement made anew."""
    if not moved:
        return
    for group in optimizer.param_groups:
        group["params"][:] = [moved.get(id(p), p) for p in group["params"]]  # LBFGS holds the list
    for old in [key for key in optimizer.state if id(key) in moved]:
        optimizer.state[moved[id(old)]] = optimizer.state.pop(old)


def place_state(optimizer: Optimizer, place: Callable[[Any], Any]) -> None:
    """Move what the optimizer already remembers to the device of its parameters."""
    for parameter, kept in optimizer.state.items():
        if isinstance(kept, dict) and isinstance(parameter, torch.Tensor):
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    kept[key] = place(value)


class PreparedScheduler:
    """A prepared scheduler.

    The schedule was written for one process: unless batches are split, one update over N
    processes has eaten N batches, so it moves N positions.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[PreparedOptimizer],
        cursor: Cursor,
        *,
        positions: int,
        with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.step_with_optimizer = with_optimizer
        self._cursor = cursor
        self._positions = positions
        self._rate: DeviceRate | None = None
        if with_optimizer and _can_follow_device(scheduler, optimizers):
            own = optimizers[0]
            device = own.guard.skipped.device
            self._rate = DeviceRate(own.optimizer, scheduler, self._advance, device)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move on, if this batch ended an update that was not skipped."""
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
        elif not self._cursor.sync:
            if self._cursor.accumulation.adjust_scheduler and hasattr(scheduler, "_step_count"):
                scheduler._step_count += 1
        elif self._rate is not None:
            self._rate.step(self.optimizers[0].guard.skipped)
        else:
            for optimizer in self.optimizers:
                if optimizer.guard.was_skipped():
                    return
            self._advance(*args, **kwargs)

    @property
    def follows_device(self) -> bool:
        """Whether a step has two halves: the host walks ahead, the device follows."""
        return self._rate is not None

    def walk(self) -> None:
        """Take the host's half of a step that the device follows."""
        assert self._rate is not None
        self._rate.walk()

    def follow(self) -> None:
        """Take the device's half of a step: nothing of it happens on the host."""
        assert self._rate is not None
        self._rate.follow(self.optimizers[0].guard.skipped)

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        scheduler = self.scheduler
        for _ in range(self._positions):
            total = getattr(scheduler, "total_steps", None)  # a one-cycle schedule has an end
            if total is None or scheduler._step_count <= total:
                scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state."""
        self._settle()
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._rate is None:
            self.scheduler.load_state_dict(state_dict)
        else:
            self._rate.restore(lambda: self.scheduler.load_state_dict(state_dict))

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each group."""
        self._settle()
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def _settle(self) -> None:
        if self._rate is not None:
            self._rate.settle()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not yet set: a copy or an unpickled one is being made
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _can_follow_device(scheduler: Any, optimizers: list[PreparedOptimizer]) -> bool:
    """Whether the rate can be a device tensor: a pure schedule of one fused optimizer."""
    if len(optimizers) != 1 or not optimizers[0].guard.decides_on_device:
        return False
    groups = optimizers[0].optimizer.param_groups
    return _is_pure(scheduler) and not any(isinstance(g["lr"], torch.Tensor) for g in groups)


def _is_pure(scheduler: Any) -> bool:
    """Whether it sets nothing but the learning rate, by nothing but the number of its steps."""
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return False
    parts = getattr(scheduler, "_schedulers", [])
    return not getattr(scheduler, "cycle_momentum", False) and all(_is_pure(p) for p in parts)


_ROOM = 8192
"""Positions that the table holds; it is written round and round, so that it never moves."""


class DeviceRate:
    """The learning rates of one optimizer's groups, as tensors that follow the device's count.

    INVARIANT: the rate is a function of the number of updates that happened, for schedulers
    whose own rate is a function of how often they were stepped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        advance: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._advance = advance
        self._host = [float(group["lr"]) for group in optimizer.param_groups]
        self._rates = [torch.tensor(rate, device=device) for rate in self._host]
        self._table = torch.zeros(len(self._host), _ROOM, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._calls = 0
        self._start()
        self._hand_over()

    def _start(self) -> None:
        """Remember where the schedule stands, to walk it again from here."""
        self._first = copy.deepcopy(self._scheduler.state_dict())
        self._first_rates = list(self._host)
        self._calls = 0
        self._position.zero_()
        self._write(0)

    def step(self, skipped: torch.Tensor) -> None:
        """Move one position, unless the update was skipped; nobody waits."""
        self.walk()
        self.follow(skipped)

    def follow(self, skipped: torch.Tensor) -> None:
        """Move the device's position, unless the update was skipped; a graph may record this."""
        self._position += 1 - skipped.to(torch.int64)
        place = self._position.remainder(_ROOM)
        for group, rate in enumerate(self._rates):
            rate.copy_(self._table[group].index_select(0, place).squeeze(0))

    def settle(self) -> None:
        """Bring the host's scheduler to where the device is; waits for the device."""
        true = int(self._position.item())
        if true == self._calls:
            return
        self._host = list(self._first_rates)
        self._scheduler.load_state_dict(copy.deepcopy(self._first))
        self._calls = 0
        for _ in range(true):
            self.walk()

    def restore(self, load: Callable[[], None]) -> None:
        """Let `load` put the scheduler and the optimizer somewhere else, and count from there."""
        load()
        self._host = [float(rate) for rate in self._scheduler.get_last_lr()]
        self._start()
        for rate, value in zip(self._rates, self._host, strict=True):
            rate.fill_(value)
        self._hand_over()

    def walk(self) -> None:
        """Run the host's schedule one position ahead, before the device may follow."""
        groups = self._optimizer.param_groups
        for group, rate in zip(groups, self._host, strict=True):
            group["lr"] = rate
        self._advance()
        self._host = [float(group["lr"]) for group in groups]
        self._calls += 1
        self._write(self._calls)
        self._hand_over()

    def _write(self, position: int) -> None:
        if self._table.device.type == "xla":  # a place by its number would be a graph of its own
            place = torch.tensor([position % _ROOM]).to(self._table.device)
            rates = torch.tensor(self._host, dtype=self._table.dtype).unsqueeze(1)
            self._table.index_copy_(1, place, rates.to(self._table.device))
            return
        for group, rate in enumerate(self._host):
            self._table[group, position % _ROOM].fill_(rate)

    def _hand_over(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
