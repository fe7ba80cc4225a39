"""Adafactor: Adam's second moment kept as one row and one column a matrix.

After Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"
(arXiv 1804.04235). With an outside rate and no scaling by the parameter's size, nothing here
waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anytrain.core.errors import BadInput, Unsupported

_HALF = (torch.float16, torch.bfloat16)
_OWN_STEP = 1e-2
_OWN_STEP_WARMING = 1e-6


class Adafactor(Optimizer):
    """Adafactor, with a rate from outside or its own.

    `relative_step` takes a rate that falls with the square root of the step (`warmup_init` lets
    it rise from 1e-6 first) and wants lr=None; `scale_parameter` multiplies any rate by the
    parameter's root mean square, at least `eps[1]`.
    """

    def __init__(  # noqa: PLR0913  # the options are the algorithm's
        self,
        params: Any,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if (lr is None) != relative_step:
            raise BadInput(
                f"Adafactor cannot take lr={lr} with relative_step={relative_step}.",
                why="relative_step=True makes its own rate, and relative_step=False needs one.",
                fix="pass lr=None for its own rate, or a rate and relative_step=False.",
            )
        if warmup_init and not relative_step:
            raise BadInput(
                "Adafactor cannot take warmup_init=True with relative_step=False.",
                why="it is the warm-up of the rate that relative_step makes.",
                fix="let a schedule warm the rate up, or pass relative_step=True and lr=None.",
            )
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise Unsupported(
                "Adafactor cannot use a sparse gradient.",
                why="its second moment is that of whole rows and columns.",
                fix="make the embedding with sparse=False, or take another optimizer.",
            )
        grad = grad.float() if grad.dtype in _HALF else grad
        wide = parameter.float() if parameter.dtype in _HALF else parameter
        state = self._state_of(parameter, grad, group)
        state["step"] += 1
        if group["scale_parameter"]:
            state["RMS"] = _rms(wide)
        rate = _rate(group, state)
        update = _direction(grad, group, state)
        update.div_((_rms(update) / group["clip_threshold"]).clamp_(min=1.0)).mul_(rate)
        if group["beta1"] is not None:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"] != 0:
            wide.add_(wide * (-group["weight_decay"] * rate))
        wide.sub_(update)
        if wide is not parameter:
            parameter.copy_(wide)

    def _state_of(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            if group["beta1"] is not None:
                state["exp_avg"] = torch.zeros_like(grad)
            if grad.dim() >= 2:
                state["exp_avg_sq_row"] = grad.new_zeros(grad.shape[:-1])
                state["exp_avg_sq_col"] = grad.new_zeros(grad.shape[:-2] + grad.shape[-1:])
            else:
                state["exp_avg_sq"] = torch.zeros_like(grad)
        return state

    def rates(self) -> list[float | None]:
        """Return the rate of each group's first parameter at its last step; None before one."""
        firsts = [(group, group["params"][:1]) for group in self.param_groups]
        return [
            float(_rate(group, self.state[first[0]]))
            if first and self.state.get(first[0])
            else None
            for group, first in firsts
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state to the bit: torch's own way rounds it to a half parameter's type."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, saved in state_dict["state"].get(number, {}).items():
                if isinstance(saved, Tensor) and saved.dtype != parameter.dtype:
                    # A copy: the caller may go on with its own.
                    self.state[parameter][key] = saved.to(parameter.device, copy=True)


def _rms(tensor: Tensor) -> Tensor:
    return torch.div(tensor.norm(2), math.sqrt(tensor.numel()))


def _rate(group: dict[str, Any], state: dict[str, Any]) -> float | Tensor:
    rate: float | Tensor = group["lr"]
    if group["relative_step"]:
        most = _OWN_STEP_WARMING * state["step"] if group["warmup_init"] else _OWN_STEP
        rate = min(most, 1.0 / math.sqrt(state["step"]))
    if group["scale_parameter"]:
        scale: Tensor = state["RMS"].clamp(min=group["eps"][1])
        return scale * rate
    return rate


def _direction(grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """Return the gradient over the root of its second moment, which takes this one in first."""
    keep = 1.0 - math.pow(state["step"], group["decay_rate"])
    square = grad**2 + group["eps"][0]
    if "exp_avg_sq" in state:
        whole: Tensor = state["exp_avg_sq"].mul_(keep).add_(square, alpha=1.0 - keep)
        return whole.rsqrt().mul_(grad)
    row, column = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
    row.mul_(keep).add_(square.mean(dim=-1), alpha=1.0 - keep)
    column.mul_(keep).add_(square.mean(dim=-2), alpha=1.0 - keep)
    rows = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return torch.mul(rows, column.unsqueeze(-2).rsqrt()).mul_(grad)


class AdafactorSchedule(LRScheduler):
    """The rates that Adafactor makes by itself, where a loop or a log asks a schedule for them.

    It is `initial_lr` until the first step.
    """

    def __init__(self, optimizer: Adafactor, initial_lr: float = 0.0) -> None:
        for group in optimizer.param_groups:
            group["initial_lr"] = initial_lr
        super().__init__(optimizer)
        for group in optimizer.param_groups:
            del group["initial_lr"]

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group."""
        optimizer: Any = self.optimizer
        known = zip(optimizer.rates(), self.base_lrs, strict=True)
        return [base if rate is None else rate for rate, base in known]
