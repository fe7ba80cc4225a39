"""Names of HF's Trainer modules that are not anytrain's: passed on, or refused with a reason.

Passed on is what is plain data, or a function of what it is given: it does the same work
whichever Trainer runs. Refused is what belongs to the inside of HF's Trainer. What a module of
HF's only imports, such as `get_scheduler` in `transformers.trainer`, is taken from where it comes
from, with our module wherever there is one: `tools/import_names.py` writes that table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module, resources
from types import ModuleType
from typing import Any

from anytrain.compat import modules
from anytrain.compat.modules import Family, Refusal, placeholder

_PACKAGE = __name__.rpartition(".")[0]

PASSED = {
    "trainer_utils": "RemoveColumnsCollator _is_peft_model _re_checkpoint "
    "align_special_tokens check_target_module_exists "
    "compare_trainer_and_checkpoint_args is_main_process load_sharded_checkpoint "
    "number_of_arguments rotate_checkpoints sort_checkpoints suppress_progress_bars "
    "total_processes_number unwrap_peft_model validate_quantization_for_training",
    "trainer_pt_utils": "BatchRebalanceSampler DistributedLengthGroupedSampler "
    "DistributedSamplerWithLoop EvalLoopContainer IterableDatasetShard LabelSmoother "
    "LengthGroupedSampler ShardSampler atleast_1d distributed_broadcast_scalars "
    "distributed_concat expand_like find_batch_size get_dataloader_sampler get_learning_rates "
    "get_length_grouped_indices get_model_param_count get_module_class_from_name "
    "get_num_trainable_parameters get_optimizer_group get_parameter_names "
    "is_attention_mask_causal nested_concat nested_detach nested_new_like nested_numpify "
    "nested_truncate numpy_pad_and_concatenate reissue_pt_warnings safe_globals "
    "set_rng_state_for_device torch_distributed_zero_first torch_pad_and_concatenate",
    "trainer_optimizer": "_parse_optim_args is_optimizer_factory",
}

FAMILIES = (
    Family(
        why="anytrain drives optuna alone.",
        fix='call trainer.hyperparameter_search(backend="optuna").',
        names={
            "trainer_utils": "default_hp_space_ray default_hp_space_wandb",
            "hyperparameter_search": "HyperParamSearchBackendBase OptunaBackend RayTuneBackend "
            "WandbBackend default_hp_search_backend",
        },
    ),
    Family(
        why="it finds out which method called it by the names of HF's methods.",
        fix="pass skip_memory_metrics=False: the metrics then tell the memory of each stage.",
        names={"trainer_utils": "TrainerMemoryTracker"},
    ),
    Family(
        why="a world of XLA devices is entered through anytrain's own backend.",
        fix="let the Trainer shard and gather; in code of your own, use trainer.accelerator.",
        names={"trainer_pt_utils": "get_tpu_sampler nested_xla_mesh_reduce"},
    ),
    Family(
        why="anytrain takes each optimizer step for the whole model at once.",
        fix='choose an optimizer without "layerwise" in its name.',
        names={"trainer_pt_utils": "LayerWiseDummyOptimizer LayerWiseDummyScheduler"},
    ),
    Family(
        why="it removes what DeepSpeed and FSDP leave behind; anytrain's folders are whole.",
        fix="leave the call out.",
        names={"trainer_pt_utils": "remove_dummy_checkpoint"},
    ),
    Family(
        why="it builds HF's optimizers from HF's arguments, inside HF's Trainer.",
        fix="override Trainer.create_optimizer, or pass optimizers= or optimizer_cls_and_kwargs=.",
        names={"trainer_optimizer": "OptimizerContext has_mixed_dtensor"},
    ),
    Family(
        why="anytrain's Trainer saves and ends at a signal by itself.",
        fix="leave it out; ANYTRAIN_STOP_SIGNALS says which signals count.",
        names={"trainer_jit_checkpoint": "CheckpointManager JITCheckpointCallback"},
    ),
)

WITHOUT_FILE = {"trainer_jit_checkpoint": "", "trainer_optimizer": ""}
"""Modules of HF's in which there is nothing but names of these tables."""


def passed(home: str) -> frozenset[str]:
    """Return the names of one of HF's modules that are passed on to it."""
    return frozenset(PASSED.get(home, "").split())


def refused(home: str) -> dict[str, Family]:
    """Return the names of one of HF's modules that are refused."""
    return modules.refused(FAMILIES, home)


def module_getattr(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, for the names that are not anytrain's."""
    home = module.rpartition(".")[2]
    known, not_done = passed(home), refused(home)
    sys.modules[module].__class__ = _PatchedModule

    def lookup(name: str) -> Any:
        if name in known:
            return getattr(import_module(f"transformers.{home}"), name)
        if name in not_done:
            return _placeholder(name, home)
        if name == "logger":  # the same as HF's: transformers.logging says how much it tells
            return import_module("transformers.utils.logging").get_logger(f"transformers.{home}")
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return _imported(home, name)

    return lookup


class _PatchedModule(ModuleType):
    """A module that notes what a script puts in the place of its functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        from anytrain.doors.trainer.overrides import REPLACED

        path = f"{self.__name__.removeprefix('anytrain.compat.')}.{name}"
        before = REPLACED.get(path, getattr(self, name, value))
        super().__setattr__(name, value)
        if callable(before) and before is not value:
            REPLACED[path] = before
        else:
            REPLACED.pop(path, None)

    def __delattr__(self, name: str) -> None:
        from anytrain.doors.trainer.overrides import REPLACED

        super().__delattr__(name)
        REPLACED.pop(f"{self.__name__.removeprefix('anytrain.compat.')}.{name}", None)


@cache
def _placeholder(name: str, home: str) -> Refusal:
    """Return what stands for a refused name; always the same."""
    return placeholder(name, f"{_PACKAGE}.{home}", refused(home)[name])


def _imported(home: str, name: str) -> Any:
    """Return a name that one of HF's modules imports; AttributeError where it does not."""
    module, inner = _import_names().get(home, {}).get(name, ("", None))
    try:
        found = import_module(module) if module else None
    except ImportError:  # HF imports it under an `if`: torch_xla, SageMaker, an older library
        found = None
    if found is None:
        raise AttributeError(f"module {_PACKAGE + '.' + home!r} has no attribute {name!r}")
    return found if inner is None else getattr(found, inner)


@cache
def _import_names() -> dict[str, dict[str, tuple[str, str | None]]]:
    """Return for each of HF's modules what it imports: the module, and the name there."""
    table = resources.files(_PACKAGE).joinpath("import_names.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, tuple[str, str | None]]] = json.loads(table)
    return found
