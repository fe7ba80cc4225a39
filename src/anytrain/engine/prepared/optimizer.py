"""An optimizer that updates at the end of an accumulated step, and only by finite gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from anytrain.engine.prepared.cursor import Cursor
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
    """Point the optimizer at the parameters that placement made anew (torch_xla does)."""
    for group in optimizer.param_groups:
        group["params"] = [moved.get(id(p), p) for p in group["params"]]


def place_state(optimizer: Optimizer, place: Callable[[Any], Any]) -> None:
    """Move what the optimizer already remembers to the device of its parameters."""
    for parameter, kept in optimizer.state.items():
        if isinstance(kept, dict) and isinstance(parameter, torch.Tensor):
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    kept[key] = place(value)
