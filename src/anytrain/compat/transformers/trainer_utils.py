"""HF's module `transformers.trainer_utils`: outputs, strategies, and functions beside a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from anytrain.compat.accelerate.utils import memory
from anytrain.compat.transformers import other_names
from anytrain.doors.trainer.outputs import (
    PREFIX_CHECKPOINT_DIR,
    BestRun,
    EvalLoopOutput,
    EvalPrediction,
    HPSearchBackend,
    PredictionOutput,
    TrainOutput,
    default_compute_objective,
    default_hp_space_optuna,
    denumpify_detensorize,
    enable_full_determinism,
    get_last_checkpoint,
    has_length,
    seed_worker,
    set_seed,
    speed_metrics,
)
from anytrain.doors.training_args import (
    FSDPOption,
    HubStrategy,
    IntervalStrategy,
    SaveStrategy,
    SchedulerType,
)

__all__ = [
    "PREFIX_CHECKPOINT_DIR",
    "BestRun",
    "EvalLoopOutput",
    "EvalPrediction",
    "FSDPOption",
    "HPSearchBackend",
    "HubStrategy",
    "IntervalStrategy",
    "PredictionOutput",
    "SaveStrategy",
    "SchedulerType",
    "TrainOutput",
    "default_compute_objective",
    "default_hp_space_optuna",
    "denumpify_detensorize",
    "enable_full_determinism",
    "find_executable_batch_size",
    "get_last_checkpoint",
    "has_length",
    "seed_worker",
    "set_seed",
    "speed_metrics",
]


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    auto_find_batch_size: bool = False,
) -> Callable[..., Any]:
    """Return the function with a batch size, or with the largest that fits in memory."""
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            auto_find_batch_size=auto_find_batch_size,
        )
    if auto_find_batch_size:
        return memory.find_executable_batch_size(function, starting_batch_size)
    return partial(function, batch_size=starting_batch_size)


__getattr__ = other_names.module_getattr(__name__)
