"""HF's module `transformers.training_args`."""

from anytrain.doors.training_args import (
    OptimizerNames,
    ParallelMode,
    TrainingArguments,
)

__all__ = ["OptimizerNames", "ParallelMode", "TrainingArguments"]
