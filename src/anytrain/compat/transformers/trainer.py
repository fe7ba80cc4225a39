"""HF's module `transformers.trainer`: the Trainer, and names of files beside it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from anytrain.compat.transformers import other_names
from anytrain.doors.callbacks import DefaultFlowCallback, ProgressCallback
from anytrain.doors.trainer import Trainer
from anytrain.doors.trainer.outputs import TRAINER_STATE_NAME

__all__ = [
    "DEFAULT_CALLBACKS",
    "DEFAULT_PROGRESS_CALLBACK",
    "FSDP_MODEL_NAME",
    "OPTIMIZER_NAME",
    "OPTIMIZER_NAME_BIN",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "TRAINER_STATE_NAME",
    "TRAINING_ARGS_NAME",
    "Trainer",
]

DEFAULT_CALLBACKS = [DefaultFlowCallback]
DEFAULT_PROGRESS_CALLBACK = ProgressCallback

# What HF's Trainer calls its files. anytrain's checkpoints list theirs in manifest.json.
TRAINING_ARGS_NAME = "training_args.bin"
OPTIMIZER_NAME = "optimizer.pt"
OPTIMIZER_NAME_BIN = "optimizer.bin"
SCALER_NAME = "scaler.pt"
SCHEDULER_NAME = "scheduler.pt"
FSDP_MODEL_NAME = "pytorch_model_fsdp"

_NEIGHBOURS = ("trainer_utils", "trainer_callback", "training_args", "trainer_pt_utils")
_imported = other_names.module_getattr(__name__)


def __getattr__(name: str) -> Any:
    """Return a name that HF's module imports, or did in a version before."""
    try:
        return _imported(name)
    except AttributeError:
        if name.startswith("_"):
            raise
    for neighbour in _NEIGHBOURS:
        found = import_module(f"{__package__}.{neighbour}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
