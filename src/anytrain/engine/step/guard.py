"""Clip gradients, and keep one that is not finite from touching anything.

INVARIANT: a step whose gradient is not finite changes no parameter, moment, step count or
schedule position, in any precision. On an accelerator with a fused optimizer the device decides
and nobody waits; elsewhere one flag is read, which on the CPU waits for nothing.

Clipping is here too: it tells the guard the norm. In host memory the norm can be read at once, so
gradients are multiplied only where it is above the bound: elsewhere the factor is 1. The values are
those of torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from anytrain.core.errors import Unsupported
from anytrain.core.notices import give_notice
from anytrain.engine.precision import LossScale

Closure = Callable[[], Any] | None


class Guard(Protocol):
    """What stands between gradients and an optimizer's update."""

    def update(self, optimizer: torch.optim.Optimizer, closure: Closure) -> Any:
        """Run the update where the gradient is finite."""

    def note_norm(self, norm: torch.Tensor, *, covers_all: bool = False) -> None:
        """Remember a gradient norm: the next update is skipped if it is not finite.

        One that `covers_all` has seen every gradient, so the guard need not look at them.
        """

    def forget(self) -> None:
        """Drop the norms of an update that did not come."""

    @property
    def decides_on_device(self) -> bool:
        """Whether reading `skipped` would be the first wait."""

    @property
    def skipped(self) -> torch.Tensor:
        """1 where the last update was skipped, else 0; on the device."""

    def was_skipped(self) -> bool:
        """Whether the last update was skipped; reads the device."""

    @property
    def num_skipped(self) -> int:
        """How many updates were skipped so far; reads the device."""


class Guarded(Protocol):
    """An optimizer with its guard, and the one that it prepared."""

    @property
    def guard(self) -> Guard: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients that the next update would use."""
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


class HostGuard:
    """Read one flag, then update or not."""

    decides_on_device = False
    tells = True
    """Whether the first update that is skipped is said."""

    def __init__(self, device: torch.device) -> None:
        self._found = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self._veto: torch.Tensor | None = None
        self._is_whole = False
        self._last = False
        self._count = 0

    def note_norm(self, norm: torch.Tensor, *, covers_all: bool = False) -> None:
        is_first = self._veto is None
        self._is_whole = covers_all or (self._is_whole and not is_first)
        self._veto = norm if self._veto is None else self._veto + norm

    def forget(self) -> None:
        self._veto = None

    def update(self, optimizer: torch.optim.Optimizer, closure: Closure) -> Any:
        if closure is not None:
            return self._update_by_closure(optimizer, closure)
        if self._is_bad(optimizer):
            self._note()
            return None
        self._last = False
        return optimizer.step()

    def _is_bad(self, optimizer: torch.optim.Optimizer) -> bool:
        veto, self._veto = self._veto, None
        if veto is not None:
            if not math.isfinite(veto.item()):
                return True
            if self._is_whole:
                return False
        return has_nonfinite(gradients(optimizer), self._found, self._one)

    def _update_by_closure(self, optimizer: torch.optim.Optimizer, closure: Closure) -> Any:
        result, undone = update_or_undo(optimizer, closure, self._found, self._one)
        if undone:
            self._note()
        else:
            self._last = False
        return result

    def _note(self) -> None:
        self._last = True
        self._count += 1
        if self.tells and self._count == 1:
            warn_of_skip()

    @property
    def skipped(self) -> torch.Tensor:
        return self._found.new_full((), float(self._last))

    def was_skipped(self) -> bool:
        return self._last

    @property
    def num_skipped(self) -> int:
        return self._count


class DeviceGuard:
    """Hand the flag to a fused optimizer, which skips the update on the device."""

    decides_on_device = True

    def __init__(self, device: torch.device) -> None:
        self._found = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self._total = torch.zeros((), device=device)
        self._veto: torch.Tensor | None = None

    def note_norm(self, norm: torch.Tensor, *, covers_all: bool = False) -> None:
        """Take a norm computed elsewhere into account; the gradients are looked at anyway."""
        self._veto = norm if self._veto is None else self._veto + norm

    def forget(self) -> None:
        self._veto = None

    def update(self, optimizer: torch.optim.Optimizer, closure: Closure) -> Any:
        """Run the update; the device leaves everything alone where the gradient is not finite."""
        if closure is not None:
            return self._update_by_closure(optimizer, closure)
        self.decide(gradients(optimizer))
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, self._found
        try:
            return optimizer.step()
        finally:
            del fused.grad_scale, fused.found_inf

    def decide(self, grads: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Return 1 where the update must be skipped, by these gradients and the norms, else 0."""
        mark_nonfinite(list(grads), self._found, self._one)
        if self._veto is not None:
            self._found.copy_(torch.maximum(self._found, (~torch.isfinite(self._veto)).float()))
            self._veto = None
        self._total.add_(self._found)
        return self._found

    def _update_by_closure(self, optimizer: torch.optim.Optimizer, closure: Closure) -> Any:
        """Undo an update that went wrong: its gradients exist only inside it."""
        result, undone = update_or_undo(optimizer, closure, self._found, self._one)
        self._found.fill_(float(undone))
        self._total.add_(self._found)
        return result

    @property
    def skipped(self) -> torch.Tensor:
        return self._found

    def was_skipped(self) -> bool:
        """Whether the last update was skipped; waits for the device."""
        return bool(self._found.item())

    @property
    def num_skipped(self) -> int:
        """How many updates were skipped so far; waits for the device."""
        return int(self._total.item())


class ScaledGuard:
    """fp16: undo the loss scale, skip what overflowed, and adapt the scale, on the device."""

    def __init__(self, scale: LossScale, device: torch.device, fused: bool) -> None:
        self._scale = scale
        self._inner: Guard = DeviceGuard(device) if fused else _QuietHostGuard(device)
        self._unscaled: torch.Tensor | None = None
        self._scratch = torch.zeros((), device=device)

    @property
    def decides_on_device(self) -> bool:
        return self._inner.decides_on_device

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the loss scale, once per update, so that clipping sees true gradients."""
        used = self._scale.used
        if used is None or self._unscaled is used:
            return
        mark_nonfinite(gradients(optimizer), self._scratch, used.reciprocal().reshape(()))
        # What overflowed must count even if clipping by value makes it finite again.
        self._inner.note_norm(torch.where(self._scratch > 0, float("inf"), 0.0))
        self._unscaled = used  # the next backward has another scale: it must be undone anew

    def note_norm(self, norm: torch.Tensor, *, covers_all: bool = False) -> None:
        self._inner.note_norm(norm, covers_all=covers_all)

    def forget(self) -> None:
        """Drop the norms and scales of an update that did not come."""
        self._inner.forget()
        self._unscaled = None

    def update(self, optimizer: torch.optim.Optimizer, closure: Closure) -> Any:
        """Run the update where nothing overflowed, then grow or shrink the scale."""
        if closure is not None:
            raise Unsupported(
                f"Cannot step {type(optimizer).__name__} by a closure in fp16.",
                why="its gradients are scaled, and exist only inside the update.",
                fix='pass mixed_precision="bf16" or "no".',
            )
        self.unscale(optimizer)
        self._unscaled = None
        # Infinity times any scale stays infinite: the inner guard finds what overflowed.
        result = self._inner.update(optimizer, closure)
        self._adapt()
        return result

    def _adapt(self) -> None:
        scaler: Any = self._scale.scaler
        if scaler.is_enabled() and scaler._scale is not None:
            torch._amp_update_scale_(
                scaler._scale,
                scaler._growth_tracker,
                self._inner.skipped,
                scaler.get_growth_factor(),
                scaler.get_backoff_factor(),
                scaler.get_growth_interval(),
            )

    @property
    def skipped(self) -> torch.Tensor:
        return self._inner.skipped

    def was_skipped(self) -> bool:
        return self._inner.was_skipped()

    @property
    def num_skipped(self) -> int:
        return self._inner.num_skipped


class _QuietHostGuard(HostGuard):
    """fp16's scale starts too high on purpose: its first skips are no news."""

    tells = False


class Judge:
    """What makes a step bad: a loss that is not finite on any rank, or a skipped update.

    In fp16 skipped updates are usual, and the loss alone counts. With `holds`, no update follows a
    bad step until somebody has looked at it: the weights are still those that it began with.
    """

    def __init__(
        self,
        optimizer: Guarded,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        *,
        reads: bool = False,
        holds: bool = True,
        held: torch.Tensor | None = None,
    ) -> None:
        self._optimizer, self._reduce = optimizer, reduce
        self._is_scaled = isinstance(optimizer.guard, ScaledGuard)
        self._reads = reads
        """Whether values are read at once: elsewhere than alone on a CPU that would be a wait."""
        self._lost: torch.Tensor | bool = False
        self._holds = holds
        if holds and isinstance(optimizer.guard, HostGuard):
            optimizer.guard.tells = False  # whoever looks at the step says what comes of it
        self.held = held
        """Infinite while updates are held back. One that is given is written to in place, so that
        a recording finds it again."""

    def look(self, loss: torch.Tensor) -> None:
        """Keep the update of a loss that is not finite from happening, whatever its gradient."""
        guard = self._optimizer.guard
        if self._reads:
            self._lost = not math.isfinite(loss.item())  # read on the CPU, which waits for nothing
            if self._lost:
                guard.note_norm(loss)
        else:
            self._lost = self._reduce((~torch.isfinite(loss)).float())
            guard.note_norm(torch.where(self._lost > 0, float("inf"), 0.0))
        if self.held is not None:
            guard.note_norm(self.held)

    def verdict(self) -> torch.Tensor | bool:
        """Return 1 for a bad step, else 0, once the update is through."""
        guard, bad = self._optimizer.guard, self._lost
        if isinstance(bad, bool):
            bad = bad or (not self._is_scaled and guard.was_skipped())
        elif not self._is_scaled:
            bad = torch.maximum(bad, guard.skipped)
        if self._holds and bad is not False:
            self._hold(bad)
        return bad

    def _hold(self, bad: torch.Tensor | bool) -> None:
        if isinstance(bad, bool):  # on the CPU, whose values can be read at once
            self.held = torch.full((), torch.inf)
            return
        held = torch.where(bad > 0, float("inf"), 0.0)
        if self.held is None:
            self.held = held
        else:
            torch.maximum(self.held, held, out=self.held)

    def release(self) -> None:
        """Let updates through again."""
        if self.held is not None:
            self.held.zero_()


def update_or_undo(
    optimizer: torch.optim.Optimizer, closure: Closure, found: torch.Tensor, one: torch.Tensor
) -> tuple[Any, bool]:
    """Run an update whose gradients exist only inside it; undo it if a parameter went wrong."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in held]
    state = copy.deepcopy(optimizer.state_dict())
    result = optimizer.step(closure)
    if not has_nonfinite([p.detach() for p in held], found, one):
        return result, False
    with torch.no_grad():
        for parameter, value in zip(held, before, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(state)
    return result, True


def mark_nonfinite(grads: list[torch.Tensor], found: torch.Tensor, factor: torch.Tensor) -> None:
    """Set `found` to 1 if any value is not finite, and multiply every gradient by `factor`."""
    found.zero_()
    for group in _by_device([_values(grad) for grad in grads]):
        if group[0].device == found.device:
            torch._amp_foreach_non_finite_check_and_unscale_(group, found, factor)
        else:
            there = found.to(group[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, there, factor.to(there.device))
            found.copy_(torch.maximum(found, there.to(found.device)))


def has_nonfinite(grads: list[torch.Tensor], found: torch.Tensor, one: torch.Tensor) -> bool:
    """Whether any value is not finite; reads one flag, which is 0 again afterwards."""
    try:  # nearly always: dense gradients on one device
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, one)
    except RuntimeError:
        mark_nonfinite(grads, found, one)
    if not found.item():
        return False
    found.zero_()
    return True


def _by_device(grads: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    if not grads or all(grad.device == grads[0].device for grad in grads):
        return [grads] if grads else []
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.device, []).append(grad)
    return list(groups.values())


def _values(grad: torch.Tensor) -> torch.Tensor:
    """Return what to look at: a sparse gradient's values, a complex one's parts."""
    if grad.is_sparse:
        grad = grad._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def warn_of_skip() -> None:
    """Say once that an update was left out."""
    give_notice(
        "An update was skipped: its gradient held a NaN or an infinity. No parameter, optimizer "
        "state or schedule position changed. Later ones are counted (num_skipped_steps).",
        stacklevel=4,
    )


_SURELY_BELOW = 0.999
"""Below this share of the bound no rounding can make the factor less than 1."""

Measure = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Clip:
    """Bound the norm of the model's gradient and return it, on the device; 0 only measures."""

    def __init__(
        self,
        optimizer: Guarded,
        model: nn.Module,
        max_norm: float,
        measure: Measure,
        *,
        untrained: tuple[nn.Parameter, ...] = (),
        sees_all: bool,
        can_read: bool,
    ) -> None:
        self._optimizer, self._model = optimizer, model
        # Only an optimizer's own gradients are scaled back.
        is_scaled = isinstance(optimizer.guard, ScaledGuard)
        self._left_out = {id(p) for p in untrained} if is_scaled else set()
        self._max_norm, self._measure = max_norm, measure
        self._can_read = can_read
        self._sees_all = sees_all
        """Whether nobody changes a gradient afterwards: the guard need not look again."""

    def __call__(self) -> torch.Tensor:
        """Clip, and let the guard know the norm."""
        found = [p for p in self._model.parameters() if id(p) not in self._left_out]
        guard = self._optimizer.guard
        if isinstance(guard, ScaledGuard):
            guard.unscale(self._optimizer.optimizer)
        norm = bound(found, self._max_norm, self._measure, can_read=self._can_read)
        guard.note_norm(norm, covers_all=self._sees_all)
        return norm


def bound(
    parameters: Sequence[torch.Tensor], max_norm: float, measure: Measure, *, can_read: bool = False
) -> torch.Tensor:
    """Return the norm of all gradients, and scale them down to `max_norm`; 0 only measures.

    `measure` is the strategy's: it knows what of the gradient lies on other ranks.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = measure(grads)
    if max_norm > 0 and not (can_read and norm.item() < _SURELY_BELOW * max_norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
