"""Callbacks: HF's events and control object, and the house's requests, through one adapter."""

from anytrain.doors.callbacks.callback import ExportableState, TrainerCallback, TrainerState
from anytrain.doors.callbacks.dispatch import Callbacks, DefaultFlowCallback, TrainerControl
from anytrain.doors.callbacks.early_stopping import EarlyStoppingCallback
from anytrain.doors.callbacks.progress import PrinterCallback, ProgressCallback

__all__ = [
    "Callbacks",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "ExportableState",
    "PrinterCallback",
    "ProgressCallback",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
]
