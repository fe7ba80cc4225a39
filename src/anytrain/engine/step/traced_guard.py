"""Guards for a device that traces: ops become one graph, which runs where the step ends.

To read a value in the middle would cut the graph there. So the update is always made, and the
device takes back what a non-finite gradient has changed. Optimizers whose update cannot be taken
back so are asked about on the host, in a step of two graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from anytrain.engine.step.guard import Closure, DeviceGuard, HostGuard, gradients, mark_nonfinite

# What a user may choose that makes an update another than the one that is undone.
_OWN = ("fused", "foreach", "differentiable", "dampening")


class SelectGuard(DeviceGuard):
    """Make the update, and keep what was there before where the gradient is not finite."""

    def __init__(self, device: torch.device, end_step: Callable[[], None]) -> None:
        super().__init__(device)
        self._end_step = end_step
        self._momentum = _Momentum(device)

    def update(self, optimizer: Optimizer, closure: Closure) -> Any:
        """Run the update; the device undoes it where the gradient is not finite."""
        if closure is not None:
            return self._update_by_closure(optimizer, closure)
        if has_hooks(optimizer):  # they came after `select`
            return self._update_if_finite(optimizer)
        with self._momentum.handed_over(optimizer):
            return self._update_and_undo(optimizer)

    def _update_if_finite(self, optimizer: Optimizer) -> Any:
        """Read the flag: hooks must not see an update that is taken back."""
        bad = self.decide(gradients(optimizer))
        self._end_step()
        return None if bad.item() else optimizer.step()

    def _update_and_undo(self, optimizer: Optimizer) -> Any:
        bad = self.decide(gradients(optimizer)) > 0
        held = [(p, g) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        before = [p.detach().clone() for p, _ in held]
        kept = [_tensors(optimizer.state.get(p, {}), copy=True) for p, _ in held]
        with _rates_are_tensors(optimizer):
            result = optimizer.step()
        with torch.no_grad():
            for (parameter, group), value, state in zip(held, before, kept, strict=True):
                # At a rate of 0 nothing moves; torch's Adam divides by it where it is a tensor.
                stays = bad | (group["lr"] == 0)
                parameter.copy_(torch.where(stays, value, parameter))
                for name, now in _tensors(optimizer.state[parameter]).items():
                    # What this update has made is 0 as long as none has happened.
                    now.copy_(torch.where(bad, state.get(name, torch.zeros_like(now)), now))
        return result


class CutGuard(HostGuard):
    """End the graph before the flag is read, so that nothing before it is computed twice."""

    def __init__(self, device: torch.device, end_step: Callable[[], None]) -> None:
        super().__init__(device)
        self._end_step = end_step

    def _is_bad(self, optimizer: Optimizer) -> bool:
        veto, self._veto = self._veto, None
        mark_nonfinite(gradients(optimizer), self._found, self._one)
        found = self._found
        if veto is not None:
            found = torch.maximum(found, (~torch.isfinite(veto)).float())
        self._end_step()
        return bool(found.item())


def why_asked(optimizer: Optimizer) -> str | None:
    """Say why this optimizer's update cannot be taken back on the device; None where it can.

    Adam's and AdamW's state begins at zero, and so does SGD's in effect if nothing dampens it.
    """
    kind = type(optimizer).__name__
    if type(optimizer) not in (Adam, AdamW, SGD):
        return f"{kind} cannot be undone on the device"
    chosen = {name: g[name] for g in optimizer.param_groups for name in _OWN if g.get(name)}
    if chosen:
        told = ", ".join(f"{name}={value}" for name, value in chosen.items())
        return f"{kind} with {told} cannot be undone on the device"
    if has_hooks(optimizer):
        return f"{kind} has step hooks, which must not see an update that is undone"
    return None


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody is told of each of the optimizer's updates."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def select(optimizer: Optimizer) -> None:
    """Let an optimizer whose update can be taken back count on the device."""
    for group in optimizer.param_groups:
        group["foreach"] = False
        if "capturable" in group:
            group["capturable"] = True
    if optimizer.state:  # a restored optimizer keeps its step count on the host until it is told
        optimizer.load_state_dict(optimizer.state_dict())


class _Momentum:
    """The momentum that Adam is given: as a tensor, once a schedule has moved it.

    As a number it is part of the graph, and each other one makes another graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: dict[int, float] = {}
        self._moved: set[int] = set()

    @contextmanager
    def handed_over(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the optimizer have it inside the block; outside it is the schedule's own."""
        held = [(i, g, g["betas"]) for i, g in enumerate(optimizer.param_groups) if "betas" in g]
        for index, group, (momentum, second) in held:
            if self._first.setdefault(index, momentum) != momentum:
                self._moved.add(index)
            if index in self._moved:
                tensor = torch.tensor(momentum, dtype=torch.float32).to(self._device)
                group["betas"] = (tensor, second)
        try:
            yield
        finally:
            for _, group, betas in held:
                group["betas"] = betas


def _tensors(state: dict[str, Any], *, copy: bool = False) -> dict[str, torch.Tensor]:
    """Return what an optimizer remembers of one parameter."""
    found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.clone() for name, value in found.items()} if copy else found


@contextmanager
def _rates_are_tensors(optimizer: Optimizer) -> Iterator[None]:
    """Let SGD multiply by a rate on the device: one that asks for no gradient is read."""
    rates = [group["lr"] for group in optimizer.param_groups] if type(optimizer) is SGD else []
    rates = [rate for rate in rates if isinstance(rate, torch.Tensor)]
    for rate in rates:
        rate.requires_grad_(True)
    try:
        yield
    finally:
        for rate in rates:
            rate.requires_grad_(False)
