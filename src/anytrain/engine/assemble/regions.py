"""Let a run's repeated blocks be compiled beside it, and look after them at its log points."""

from __future__ import annotations

import torch
from torch import nn

from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.session import Session
from anytrain.engine.step.recorded.recordings import Recordings
from anytrain.engine.step.regional.regional import Region, RegionalTier
from anytrain.engine.step.update import RecordedUpdate, Update

_MOST_FULL = 0.8


class Regions:
    """The compiled blocks of one run."""

    def __init__(self, session: Session, tier: RegionalTier, step: Update) -> None:
        self._session, self._tier, self._step = session, tier, step
        self._before = (0, 0.0)

    def tend(self, steps_left: int) -> None:
        """Compile, put in or take out, as it repays; every rank calls it at the same step."""
        step_s = self._step_s()
        if step_s is None:
            return
        if self._keeps_from_recording():
            self._tier.region.remove("with compiled blocks a step could not be recorded")
            self._recordings().try_again()
            return
        with self._session.ledger.span("record"):
            if not self._tier.tend(steps_left, step_s, has_room=self._has_room()):
                return
        if isinstance(self._step, RecordedUpdate):
            self._step.recordings.forget(code_changed=True)
        how = self._session.plan.step.value
        self._session.revise("step", how, self._tier.because, self._session.cursor.updates)

    def _recordings(self) -> Recordings:
        assert isinstance(self._step, RecordedUpdate)
        return self._step.recordings

    def _keeps_from_recording(self) -> bool:
        """Whether steps were recorded until compiled blocks came in: that is worth more."""
        if not isinstance(self._step, RecordedUpdate) or not self._tier.region.is_installed:
            return False
        return self._recordings().stopped is not None

    def close(self) -> None:
        """End what goes on in the background, and give the blocks their own calls back."""
        self._tier.close()

    def _has_room(self) -> bool:
        """Whether the device holds a second process, which compiles, without harm to this one."""
        use = self._session.backend.memory(self._session.device)
        return use.total_bytes is None or (use.peak_bytes or 0) < _MOST_FULL * use.total_bytes

    def _step_s(self) -> float | None:
        """Return how long a step took since the last time; None where there was none."""
        ledger = self._session.ledger
        computing, waiting = ledger.span("step"), ledger.span("wait")
        number, seconds = computing.uses, computing.seconds + waiting.seconds
        (before, seconds_before), self._before = self._before, (number, seconds)
        return (seconds - seconds_before) / (number - before) if number > before else None


def build_regions(run: Run, model: nn.Module, step: Update) -> Regions | None:
    """Return what compiles a run's blocks; None where they stay as they are.

    That is so on the CPU, where it gains nothing, in deterministic mode, where a step must not
    change its way, where somebody asked for a way, and where layers have kernels of their own.
    """
    session = run.session
    fixed = torch.are_deterministic_algorithms_enabled() or not session.planned.step_is_free
    if session.device.type != "cuda" or fixed or _has_kernels(step, session):
        return None
    inner = run.unwrap(model, keep_forward=True, keep_compiled=True)
    region = Region(inner, session.device)
    if region.is_off and session.world.size == 1:
        return None
    return Regions(session, RegionalTier(region, session.world), step)


def _has_kernels(step: Update, session: Session) -> bool:
    if not isinstance(step, RecordedUpdate):
        return False
    return step.shortening.replaces_layers and session.cursor.accumulation.num_steps == 1
