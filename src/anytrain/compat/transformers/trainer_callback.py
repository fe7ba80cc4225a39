"""HF's module `transformers.trainer_callback`: callbacks, their control and their state."""

from anytrain.compat.transformers import other_names
from anytrain.doors.callbacks import (
    Callbacks as CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

__all__ = [
    "CallbackHandler",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "ExportableState",
    "PrinterCallback",
    "ProgressCallback",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
]

__getattr__ = other_names.module_getattr(__name__)
