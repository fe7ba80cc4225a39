"""Arguments of a run, as HF's `TrainingArguments` spells them; importing this loads no torch."""

from anytrain.doors.training_args.accelerator_config import AcceleratorConfig
from anytrain.doors.training_args.arguments import Seq2SeqTrainingArguments, TrainingArguments
from anytrain.doors.training_args.fields import (
    DebugOption,
    EvaluationStrategy,
    FSDPOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
)
from anytrain.doors.training_args.parse import HfArg, HfArgumentParser

__all__ = [
    "AcceleratorConfig",
    "DebugOption",
    "EvaluationStrategy",
    "FSDPOption",
    "HfArg",
    "HfArgumentParser",
    "HubStrategy",
    "IntervalStrategy",
    "OptimizerNames",
    "ParallelMode",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainingArguments",
    "TrainingArguments",
]
