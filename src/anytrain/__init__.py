"""Train a PyTorch script on any device: `from anytrain import Accelerator`.

Names are loaded when they are first used, so that `import anytrain` is quick and loads no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from anytrain._version import __version__
from anytrain.core import environment as _environment

# libtorch reads the variable when it is loaded: setting it after `import torch` does nothing.
_environment.enable_mps_fallback()
if _environment.variable("ANYTRAIN_BEATS"):
    # A launcher of ours listens. As early as can be: it explains crashes before the first step.
    from anytrain.machine.processes.stack_dumps import watch_rank as _watch_rank

    _watch_rank()

_ACCELERATOR = "anytrain.doors.accelerator"
_ARGUMENTS = "anytrain.doors.training_args"
_CALLBACKS = "anytrain.doors.callbacks"
_LAUNCH = "anytrain.doors.launch"
_READING = "anytrain.doors.reading"
_METRICS = "anytrain.engine.metrics"
_OUTPUTS = "anytrain.doors.trainer.outputs"
_TRAINER = "anytrain.doors.trainer"
_HOMES = {
    "Accelerator": _ACCELERATOR,
    "AcceleratorState": _ACCELERATOR,
    "Accuracy": _METRICS,
    "AutocastKwargs": _ACCELERATOR,
    "DataLoaderConfiguration": _ACCELERATOR,
    "debug_launcher": _LAUNCH,
    "DistributedDataParallelKwargs": _ACCELERATOR,
    "DistributedType": _ACCELERATOR,
    "EarlyStoppingCallback": _CALLBACKS,
    "EvalPrediction": _OUTPUTS,
    "F1": _METRICS,
    "find_executable_batch_size": _ACCELERATOR,
    "get_last_checkpoint": _OUTPUTS,
    "get_logger": _ACCELERATOR,
    "GradientAccumulationPlugin": _ACCELERATOR,
    "GradientState": _ACCELERATOR,
    "GradScalerKwargs": _ACCELERATOR,
    "HfArgumentParser": _ARGUMENTS,
    "InitProcessGroupKwargs": _ACCELERATOR,
    "Matthews": _METRICS,
    "MeanSquaredError": _METRICS,
    "notebook_launcher": _LAUNCH,
    "PartialState": _ACCELERATOR,
    "Pearson": _METRICS,
    "PrinterCallback": _CALLBACKS,
    "ProfileKwargs": _ACCELERATOR,
    "ProgressCallback": _CALLBACKS,
    "ProjectConfiguration": _ACCELERATOR,
    "release_memory": _ACCELERATOR,
    "report": _READING,
    "Seq2SeqTrainer": _TRAINER,
    "Seq2SeqTrainingArguments": _ARGUMENTS,
    "set_seed": _ACCELERATOR,
    "skip_first_batches": _ACCELERATOR,
    "Spearman": _METRICS,
    "synchronize_rng_states": _ACCELERATOR,
    "Together": _METRICS,
    "tqdm": _ACCELERATOR,
    "Trainer": _TRAINER,
    "TrainerCallback": _CALLBACKS,
    "TrainerControl": _CALLBACKS,
    "TrainerState": _CALLBACKS,
    "TrainingArguments": _ARGUMENTS,
    "why": _READING,
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    # `as` makes a name public for type checkers, which cannot read a computed __all__.
    from anytrain.doors.accelerator import (
        Accelerator as Accelerator,
        AcceleratorState as AcceleratorState,
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        DistributedType as DistributedType,
        GradientAccumulationPlugin as GradientAccumulationPlugin,
        GradientState as GradientState,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
        PartialState as PartialState,
        ProfileKwargs as ProfileKwargs,
        ProjectConfiguration as ProjectConfiguration,
        find_executable_batch_size as find_executable_batch_size,
        get_logger as get_logger,
        release_memory as release_memory,
        set_seed as set_seed,
        skip_first_batches as skip_first_batches,
        synchronize_rng_states as synchronize_rng_states,
        tqdm as tqdm,
    )
    from anytrain.doors.callbacks import (
        EarlyStoppingCallback as EarlyStoppingCallback,
        PrinterCallback as PrinterCallback,
        ProgressCallback as ProgressCallback,
        TrainerCallback as TrainerCallback,
        TrainerControl as TrainerControl,
        TrainerState as TrainerState,
    )
    from anytrain.doors.launch import (
        debug_launcher as debug_launcher,
        notebook_launcher as notebook_launcher,
    )
    from anytrain.doors.reading import report as report, why as why
    from anytrain.doors.trainer import (
        Seq2SeqTrainer as Seq2SeqTrainer,
        Trainer as Trainer,
    )
    from anytrain.doors.trainer.outputs import (
        EvalPrediction as EvalPrediction,
        get_last_checkpoint as get_last_checkpoint,
    )
    from anytrain.doors.training_args import (
        HfArgumentParser as HfArgumentParser,
        Seq2SeqTrainingArguments as Seq2SeqTrainingArguments,
        TrainingArguments as TrainingArguments,
    )
    from anytrain.engine.metrics import (
        F1 as F1,
        Accuracy as Accuracy,
        Matthews as Matthews,
        MeanSquaredError as MeanSquaredError,
        Pearson as Pearson,
        Spearman as Spearman,
        Together as Together,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'anytrain' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
