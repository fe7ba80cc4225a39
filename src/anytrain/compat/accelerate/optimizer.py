"""An optimizer that updates at the end of an accumulated step, and only by finite gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.utils.operations import send_to_device
from anytrain.doors.accelerator.states import live_session
from anytrain.engine.assemble.run import guard_for
from anytrain.engine.data.prefetch import Placement
from anytrain.engine.prepared.optimizer import PreparedOptimizer, place_state

__all__ = ["AcceleratedOptimizer", "move_to_device"]

__getattr__ = refused.module_getattr(__name__)


def move_to_device(state: Any, device: torch.device) -> Any:
    """Return an optimizer's state on the device."""
    return send_to_device(state, device)


class AcceleratedOptimizer(PreparedOptimizer):
    """A prepared optimizer under HF's name, which can be made by hand."""

    _is_accelerate_prepared = True

    def __init__(
        self, optimizer: Optimizer, device_placement: bool = True, scaler: Any = None
    ) -> None:
        found = live_session()
        if device_placement:
            place_state(optimizer, Placement(found.backend, found.device))
        super().__init__(optimizer, found.cursor, guard_for(optimizer, found), found.world)

    @property
    def _is_overflow(self) -> bool:
        return self.step_was_skipped

    @_is_overflow.setter
    def _is_overflow(self, value: bool) -> None:
        # HF's own tests say by hand that an update was skipped.
        vars(self.guard)["_last"] = value
