"""Door 1: your loop, our tools."""

from anytrain.doors.accelerator.facade import Accelerator
from anytrain.doors.accelerator.logging import get_logger, tqdm
from anytrain.doors.accelerator.memory import find_executable_batch_size, release_memory
from anytrain.doors.accelerator.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from anytrain.doors.accelerator.states import (
    AcceleratorState,
    GradientState,
    PartialState,
    set_seed,
    synchronize_rng_states,
)
from anytrain.engine.prepared.rebuild import skip_first_batches

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "find_executable_batch_size",
    "get_logger",
    "release_memory",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
    "tqdm",
]
