"""Names of HF Accelerate for things that anytrain does not do, each with why and what instead.

Beside them stand the modules that a module of HF's takes names from, and those that have no file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from anytrain.compat import modules
from anytrain.compat.modules import Family, Refusal, placeholder, refusal

__all__ = ["FAMILIES", "Family", "Refusal", "names", "module_getattr", "refusal"]


FAMILIES = (
    Family(
        why="each process holds the whole model; DeepSpeed brings an engine of its own.",
        fix="use plain data parallel, bf16, gradient accumulation, or a smaller model.",
        names={
            "utils.dataclasses": "DeepSpeedPlugin DeepSpeedSequenceParallelConfig",
            "utils.deepspeed": "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper "
            "DeepSpeedSchedulerWrapper DummyOptim DummyScheduler HfDeepSpeedConfig "
            "get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed",
            "utils.other": "compile_regions_deepspeed",
            "utils.launch": "prepare_deepspeed_cmd_env",
        },
    ),
    Family(
        why="each process holds the whole model; anytrain does not shard it.",
        fix="use plain data parallel, bf16, gradient accumulation, or a smaller model.",
        names={
            "parallelism_config": "ParallelismConfig",
            "utils.dataclasses": "FullyShardedDataParallelPlugin TorchTensorParallelPlugin "
            "TorchTensorParallelConfig TorchContextParallelConfig get_module_class_from_name",
            "utils.fsdp_utils": "disable_fsdp_ram_efficient_loading "
            "enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac "
            "fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy "
            "fsdp2_prepare_model fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler "
            "get_parameters_from_modules load_fsdp_model load_fsdp_optimizer merge_fsdp_weights "
            "save_fsdp_model save_fsdp_optimizer",
            "utils.other": "compile_regions_fsdp2",
            "utils.launch": "prepare_extend_env_parallelism_config",
        },
    ),
    Family(
        why="Megatron-LM brings models, loaders and an engine of its own.",
        fix="train the model itself, with plain data parallel.",
        names={
            "utils.dataclasses": "MegatronLMPlugin add_model_config_to_megatron_parser "
            "parse_bert_config parse_gpt2_config parse_t5_config parse_llama_config "
            "parse_glm4_moe_config MODEL_CONFIGS_TO_MEGATRON_PARSERS",
            "utils.megatron_lm": "AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine "
            "MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMOptimizerWrapper "
            "MegatronLMSchedulerWrapper T5TrainStep avg_losses_across_data_parallel_group "
            "finish_mpu_init gather_across_data_parallel_groups initialize model_provider_func "
            "prepare_data_loader prepare_model_optimizer_scheduler prepare_optimizer "
            "prepare_scheduler",
        },
    ),
    Family(
        why="fp8 needs Transformer Engine, torchao or MS-AMP, and anytrain has no fp8 recipe.",
        fix='pass mixed_precision="bf16".',
        names={
            "utils.dataclasses": "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
            "utils.ao": "convert_model_to_fp8_ao filter_first_and_last_linear_layers "
            "filter_linear_layers find_first_last_linear_layers",
            "utils.transformer_engine": "apply_fp8_autowrap contextual_fp8_autocast convert_model",
            "utils.launch": "setup_fp8_env",
        },
    ),
    Family(
        why="anytrain trains weights as they are and quantizes none.",
        fix="load the model quantized by its own library, train adapters on it, or use bf16.",
        names={
            "utils.dataclasses": "BnbQuantizationConfig",
            "utils.bnb": "get_keys_to_not_convert get_parameter_device "
            "get_quantized_model_device_map load_and_quantize_model quantize_and_offload_8bit "
            "replace_with_bnb_layers",
        },
    ),
    Family(
        why="a model that trains lives whole on one device; anytrain spreads no layers over "
        "devices, host memory or disk.",
        fix="keep the model on the device that prepare() puts it on; for inference with a "
        "device_map, let transformers' from_pretrained(device_map=...) spread it.",
        names={
            "big_modeling": "attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook "
            "disk_offload dispatch_model",
            "hooks": "AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook "
            "UserCpuOffloadHook add_hook_to_module attach_align_device_hook "
            "attach_align_device_hook_on_blocks attach_execution_device_hook",
            "utils.modeling": "check_device_map check_tied_parameters_on_same_device "
            "clean_device_map fallback_allocate get_balanced_memory get_max_layer_size "
            "get_max_memory get_module_leaves get_module_size_with_ties "
            "get_state_dict_from_offload get_state_dict_offloaded_model infer_auto_device_map "
            "load_offloaded_weights",
            "utils.offload": "OffloadedWeightsLoader PrefixedDataset "
            "extract_submodules_state_dict load_offloaded_weight offload_state_dict "
            "offload_weight save_offload_index",
        },
    ),
    Family(
        why="each process runs the whole model; there is no pipeline of stages.",
        fix="run the model on one device, or split the inputs with split_between_processes().",
        names={
            "inference": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward "
            "prepare_pippy",
        },
    ),
    Family(
        why="anytrain starts its processes itself and needs no command put together by hand.",
        fix="use `anytrain launch`, torchrun or srun; in code, notebook_launcher().",
        names={
            "utils.launch": "PrepareForLaunch env_var_path_add prepare_multi_gpu_env "
            "prepare_simple_launcher_cmd_env prepare_tpu",
        },
    ),
    Family(
        why="SageMaker jobs are started with its own library.",
        fix="start the script with SageMaker's estimator; inside it runs as under torchrun.",
        names={"utils.launch": "prepare_sagemager_args_inputs"},
    ),
    Family(
        why="a checkpoint is a whole run, written by one operation in which every rank is "
        "checked, and holds no pickle.",
        fix="call accelerator.save_state() and accelerator.load_state().",
        names={
            "checkpointing": "load_accelerator_state load_custom_state save_accelerator_state "
            "save_custom_state",
        },
    ),
    Family(
        why="anytrain ships only the trackers that its tests run.",
        fix='log with "tensorboard", "wandb", "mlflow" or "trackio", or pass an instance of your '
        "own GeneralTracker subclass.",
        names={
            "tracking": "AimTracker ClearMLTracker CometMLTracker DVCLiveTracker SwanLabTracker",
        },
    ),
    Family(
        why="anytrain wraps an optimizer and does not replace its step.",
        fix="read optimizer.step_was_skipped after optimizer.step().",
        names={"optimizer": "patch_optimizer_step"},
    ),
    Family(
        why="anytrain installs nothing.",
        fix="install torch_xla, or torch_tpu, with pip.",
        names={"utils.torch_xla": "install_xla"},
    ),
    Family(
        why="pinning a process to the cores near its GPU is its launcher's work.",
        fix="use `numactl` or your scheduler's binding options.",
        names={"utils.environment": "override_numa_affinity set_numa_affinity"},
    ),
)


TAKES = {
    "accelerator": "logging state utils data_loader tracking hooks big_modeling",
    "checkpointing": "logging state utils",
    "data_loader": "logging state utils",
    "hooks": "utils utils.modeling state",
    "launchers": "state utils",
    "memory_utils": "utils.memory",
    "optimizer": "state utils",
    "state": "utils",
    "tracking": "logging state utils",
    "utils.ao": "utils.modeling",
    "utils.bnb": "utils.modeling",
    "utils.imports": "utils.environment utils.versions",
    "utils.launch": "utils",
    "utils.memory": "utils.imports",
    "utils.modeling": "state utils",
    "utils.operations": "state utils",
    "utils.other": "state utils",
    "utils.random": "state utils",
    "utils.transformer_engine": "utils.modeling",
}
"""The modules that one of HF's imports its tools from: people import them from either."""

WITHOUT_FILE = {
    "checkpointing": "",
    "inference": "",
    "memory_utils": "find_executable_batch_size",
    "parallelism_config": "",
    "utils.ao": "has_ao_layers",
    "utils.bnb": "has_4bit_bnb_layers",
    "utils.deepspeed": "",
    "utils.fsdp_utils": "",
    "utils.megatron_lm": "",
    "utils.offload": "",
    "utils.torch_xla": "",
    "utils.transformer_engine": "has_transformer_engine_layers",
}
"""Modules of HF's that are made of these tables, and the names there that are not refused."""
_WITHOUT_FILE = {f"{__package__}.{name}" for name in WITHOUT_FILE}


def names(home: str) -> dict[str, Family]:
    """Return what is refused in one of HF's modules."""
    return modules.refused(FAMILIES, home)


def homes_below(package: str) -> list[str]:
    """Return the modules of one of HF's packages in which something is refused."""
    homes = {home for family in FAMILIES for home in family.names}
    return sorted(home for home in homes if home.startswith(f"{package}."))


def module_getattr(module: str, *others: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`: what is refused there, and what HF's module imports.

    `others` are modules of HF's whose refused names are there too.
    """
    own = module.removeprefix(f"{__package__}.")
    known = {name: home for home in (own, *others) for name in names(home)}

    def lookup(name: str) -> Any:
        if name in known:
            return _placeholder(name, known[name])
        if f"{module}.{name}" in _WITHOUT_FILE:
            return import_module(f"{module}.{name}")
        for neighbour in () if name.startswith("_") else TAKES.get(own, "").split():
            found = import_module(f"{__package__}.{neighbour}")
            if name == "logger" and neighbour == "logging":
                return found.get_logger(module)
            if hasattr(found, name):
                return getattr(found, name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return lookup


@cache
def _placeholder(name: str, home: str) -> Refusal:
    """Return the class without instances that stands for a refused name; always the same."""
    return placeholder(name, f"{__package__}.{home}", names(home)[name])
