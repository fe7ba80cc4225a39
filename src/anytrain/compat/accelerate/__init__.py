"""HF Accelerate's names over anytrain, so that a script changes its import lines and nothing else.

`from accelerate import Accelerator` becomes `from anytrain.compat.accelerate import Accelerator`.
What anytrain does not do is there by name, and says why when it is used.
"""

from anytrain.compat import modules
from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.accelerator import Accelerator
from anytrain.compat.accelerate.big_modeling import (
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from anytrain.compat.accelerate.data_loader import skip_first_batches
from anytrain.compat.accelerate.launchers import debug_launcher, notebook_launcher
from anytrain.compat.accelerate.state import PartialState
from anytrain.compat.accelerate.utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from anytrain.compat.accelerate.utils.imports import is_rich_available
from anytrain.compat.accelerate.utils.memory import find_executable_batch_size
from anytrain.compat.accelerate.utils.modeling import load_checkpoint_in_model
from anytrain.compat.accelerate.utils.random import synchronize_rng_states

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "PartialState",
    "ProfileKwargs",
    "debug_launcher",
    "find_executable_batch_size",
    "init_empty_weights",
    "init_on_device",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "skip_first_batches",
    "synchronize_rng_states",
]

__version__ = "1.15.0"
"""The version of HF Accelerate whose names these are."""

__getattr__ = refused.module_getattr(
    __name__,
    "big_modeling",
    "inference",
    "parallelism_config",
    "utils.dataclasses",
    "utils.modeling",
)

modules.serve(__name__, refused.WITHOUT_FILE, refused.module_getattr)
