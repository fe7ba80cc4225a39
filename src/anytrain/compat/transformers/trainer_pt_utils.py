"""HF's module `transformers.trainer_pt_utils`: arrays, samplers, and a Trainer's reports."""

from __future__ import annotations

from typing import Any

from anytrain.compat.accelerate.utils.operations import gather
from anytrain.compat.transformers import other_names
from anytrain.doors.trainer import Trainer
from anytrain.doors.trainer.outputs import metrics_format
from anytrain.doors.training_args import AcceleratorConfig

__all__ = [
    "AcceleratorConfig",
    "log_metrics",
    "metrics_format",
    "nested_gather",
    "save_metrics",
    "save_state",
]

# HF has these as functions that take a Trainer first.
log_metrics = Trainer.log_metrics
save_metrics = Trainer.save_metrics
save_state = Trainer.save_state


def nested_gather(tensors: Any, parallel_mode: Any = None, name: str | None = None) -> Any:
    """Return the values of all ranks, one behind the other; alone, what was given.

    The run itself knows whether it has several processes: `parallel_mode` is not asked.
    """
    return None if tensors is None else gather(tensors)


__getattr__ = other_names.module_getattr(__name__)
