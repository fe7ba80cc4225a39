"""Trackers under HF's names; those that anytrain has none for are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from anytrain.compat.accelerate import refused
from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.doors.accelerator.states import live_session
from anytrain.engine.recording import trackers
from anytrain.engine.recording.trackers.general import GeneralTracker
from anytrain.engine.recording.trackers.mlflow import MLflowTracker
from anytrain.engine.recording.trackers.tensorboard import TensorBoardTracker
from anytrain.engine.recording.trackers.trackio import TrackioTracker
from anytrain.engine.recording.trackers.wandb import WandBTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "GeneralTracker",
    "MLflowTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

__getattr__ = refused.module_getattr(__name__)

LOGGER_TYPE_TO_CLASS = trackers.TABLE


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a tracker's method to do nothing on other processes, if only the main one writes."""

    @wraps(function)
    def here_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and live_session().world.rank != 0:
            return None
        return function(self, *args, **kwargs)

    return here_only


def get_available_trackers() -> list[str]:
    """Return the names that can be logged with here."""
    return trackers.available()


def register_tracker_class(tracker_class: Any) -> None:
    """Let a user's tracker class be chosen by its name."""
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise BadInput(
            f"Cannot register {tracker_class!r} as a tracker.",
            why="only a class made from GeneralTracker can be chosen by name.",
            fix="pass the class itself, not an instance, and let it inherit GeneralTracker.",
        )
    name = getattr(tracker_class, "name", None)
    if LOGGER_TYPE_TO_CLASS.get(str(name), tracker_class) is not tracker_class:
        give_notice(
            f"{name!r} now means {tracker_class.__name__}; it was another tracker's name.",
            stacklevel=2,
        )
    trackers.register(tracker_class)


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None
) -> list[str | GeneralTracker]:
    """Return the trackers that `log_with` means, each once, or refuse it."""
    return trackers.resolve(log_with, logging_dir)
