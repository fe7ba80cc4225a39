"""The flags by which an HF-style callback asks for something."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from anytrain.core.events import NO_REQUESTS, EventKind, Request
from anytrain.doors.callbacks.hf import ExportableState

_FLAGS: dict[Request, str] = {
    "log": "should_log",
    "evaluate": "should_evaluate",
    "save": "should_save",
    "stop_epoch": "should_epoch_stop",
    "stop": "should_training_stop",
}


@dataclass
class TrainerControl(ExportableState):
    """What callbacks have asked for and the loop has not done yet."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, Any]:
        """Return the flags as they stand."""
        return {"args": dataclasses.asdict(self), "attributes": {}}

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_log = self.should_evaluate = self.should_save = False


def standing(control: TrainerControl) -> frozenset[Request]:
    """Return the requests that stand in the flags now.

    >>> sorted(standing(TrainerControl(should_save=True, should_training_stop=True)))
    ['save', 'stop']
    """
    if not (
        control.should_log
        or control.should_evaluate
        or control.should_save
        or control.should_epoch_stop
        or control.should_training_stop
    ):
        return NO_REQUESTS
    return frozenset(request for request, flag in _FLAGS.items() if getattr(control, flag))


def ask(control: TrainerControl, requests: Iterable[Request]) -> None:
    """Raise the flag of every request; a flag that is up stays up."""
    for request in requests:
        setattr(control, _FLAGS[request], True)


def _evaluated(control: TrainerControl) -> None:
    control.should_evaluate = False


def _saved(control: TrainerControl) -> None:
    control.should_save = False


def _logged(control: TrainerControl) -> None:
    control.should_log = False


CLEARED_BY: Mapping[EventKind, Callable[[TrainerControl], None]] = {
    "train_begin": TrainerControl._new_training,
    "epoch_begin": TrainerControl._new_epoch,
    "step_begin": TrainerControl._new_step,
    "evaluate": _evaluated,
    "save": _saved,
    "log": _logged,
}
"""What an event clears before any callback hears of it: a wish fulfilled, or out of date."""
