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

_ACCELERATOR = "anytrain.doors.accelerator"
_LAUNCH = "anytrain.doors.launch"
_HOMES = {
    "Accelerator": _ACCELERATOR,
    "AcceleratorState": _ACCELERATOR,
    "AutocastKwargs": _ACCELERATOR,
    "DataLoaderConfiguration": _ACCELERATOR,
    "DistributedDataParallelKwargs": _ACCELERATOR,
    "DistributedType": _ACCELERATOR,
    "GradScalerKwargs": _ACCELERATOR,
    "GradientAccumulationPlugin": _ACCELERATOR,
    "GradientState": _ACCELERATOR,
    "InitProcessGroupKwargs": _ACCELERATOR,
    "PartialState": _ACCELERATOR,
    "ProfileKwargs": _ACCELERATOR,
    "ProjectConfiguration": _ACCELERATOR,
    "debug_launcher": _LAUNCH,
    "find_executable_batch_size": _ACCELERATOR,
    "get_logger": _ACCELERATOR,
    "notebook_launcher": _LAUNCH,
    "release_memory": _ACCELERATOR,
    "set_seed": _ACCELERATOR,
    "skip_first_batches": _ACCELERATOR,
    "synchronize_rng_states": _ACCELERATOR,
    "tqdm": _ACCELERATOR,
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
    from anytrain.doors.launch import (
        debug_launcher as debug_launcher,
        notebook_launcher as notebook_launcher,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'anytrain' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
