"""Callbacks: HF's events and control object, and the house's requests, through one adapter."""

from anytrain.doors.callbacks.adapter import Callbacks
from anytrain.doors.callbacks.control import TrainerControl
from anytrain.doors.callbacks.early_stopping import EarlyStoppingCallback
from anytrain.doors.callbacks.flow import DefaultFlowCallback
from anytrain.doors.callbacks.hf import ExportableState, TrainerCallback
from anytrain.doors.callbacks.progress import PrinterCallback, ProgressCallback
from anytrain.doors.callbacks.state import TrainerState

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
