"""The part of `Trainer` that logs, evaluates and saves at a step's end, by the name HF has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anytrain.doors.accelerator import Accelerator
from anytrain.doors.callbacks import Callbacks, TrainerControl
from anytrain.doors.trainer import signatures
from anytrain.doors.trainer.job import TrainerJob
from anytrain.doors.trainer.reports import Reports
from anytrain.engine.loop import Requests, serve
from anytrain.engine.recording.meter import Meter

_SERVED: Requests = frozenset({"log", "evaluate", "save"})


class Serving(Reports):
    """What a subclass may do in place of the loop, or around it."""

    model: nn.Module
    accelerator: Accelerator
    control: TrainerControl
    callback_handler: Callbacks
    _answer_bad_steps: Callable[..., None]
    _meter: Meter
    _began: float
    _trial: Any
    _ignored_in_eval: list[str] | None
    _loss_so_far: tuple[float, int]
    _globalstep_last_logged: int
    _total_loss_scalar = 0.0
    """The losses that were logged by a subclass's own code, added up."""

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor | None = None,
        grad_norm: torch.Tensor | float | None = None,
        model: nn.Module | None = None,
        trial: Any = None,
        epoch: float | None = None,
        ignore_keys_for_eval: list[str] | None = None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save, as callbacks ask; the values are for those who override it."""
        serve(TrainerJob(self), self.callback_handler.requests, self._session.ledger)  # type: ignore[arg-type]

    def _serve_own_way(self) -> Requests:
        """Call a subclass's own way; return what is asked for besides."""
        last, total, meter = self._globalstep_last_logged, self._total_loss_scalar, self._meter
        values = {
            "tr_loss": meter.loss,
            "grad_norm": meter.grad_norm,
            "model": self.model,
            "trial": self._trial,
            "epoch": self.state.epoch,
            "ignore_keys_for_eval": self._ignored_in_eval,
            "start_time": self._began,
            # To read it waits for the device, which nobody has to who does not log.
            "learning_rate": meter.learning_rate if self.control.should_log else None,
        }
        signatures.call_by_name(self._maybe_log_save_evaluate, values)
        has_logged = self._globalstep_last_logged > last  # with super() the meter was read there
        if has_logged and (reading := meter.read(self._session.world)) is not None:
            logged, steps = self._loss_so_far
            num = reading.num_steps - reading.num_bad
            self._loss_so_far = (logged + self._total_loss_scalar - total, steps + num)
            self._answer_bad_steps(reading)
        return self.callback_handler.requests - _SERVED

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Return the values of all ranks, one behind the other."""
        return self.accelerator.gather(tensors)
