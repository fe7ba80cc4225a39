"""HF's module `transformers.trainer_utils`: outputs, strategies, and functions beside a Trainer."""

from anytrain.compat.transformers import elsewhere
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
    "get_last_checkpoint",
    "has_length",
    "seed_worker",
    "set_seed",
    "speed_metrics",
]

__getattr__ = elsewhere.of(__name__)
