"""Which libraries and devices are here, as far as anytrain uses them.

What anytrain does not do is not available, whatever is installed: a script that asks first then
takes the way that works.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.refused import names, refusal
from anytrain.compat.accelerate.utils.environment import parse_flag_from_env
from anytrain.compat.accelerate.utils.versions import compare_versions
from anytrain.core import environment
from anytrain.core.facts import Found
from anytrain.machine.backends import probe

__getattr__ = refused.module_getattr(__name__)

USE_TORCH_XLA = parse_flag_from_env("USE_TORCH_XLA", default=True)


def _installed(package: str, distribution: str | None = None) -> Callable[[], bool]:
    """Return a function that says whether a library is installed; it loads nothing."""

    def is_installed() -> bool:
        if find_spec(package) is None:
            return False
        try:
            # A folder that merely has the library's name has no metadata.
            importlib.metadata.version(distribution or package)
        except importlib.metadata.PackageNotFoundError:
            return False
        return True

    return is_installed


def _never(*args: Any, **kwargs: Any) -> bool:
    """Return False: anytrain does not do this."""
    return False


is_boto3_available = _installed("boto3")
is_datasets_available = _installed("datasets")
is_import_timer_available = _installed("import_timer")
is_matplotlib_available = _installed("matplotlib")
is_pandas_available = _installed("pandas")
is_peft_available = _installed("peft")
is_pynvml_available = _installed("pynvml", "nvidia-ml-py")
is_pytest_available = _installed("pytest")
is_sagemaker_available = _installed("sagemaker")
is_schedulefree_available = _installed("schedulefree")
is_timm_available = _installed("timm")
is_torchdata_available = _installed("torchdata")
is_torchvision_available = _installed("torchvision")
is_tqdm_available = _installed("tqdm")
is_trackio_available = _installed("trackio")
is_transformers_available = _installed("transformers")
is_triton_available = _installed("triton")
is_wandb_available = _installed("wandb")
is_tensorboard_available = _installed("tensorboard")

# Other engines, fp8 and quantization.
is_deepspeed_available = _never
is_megatron_lm_available = _never
is_pippy_available = _never
is_lomo_available = _never
is_fp8_available = _never
is_msamp_available = _never
is_torchao_available = _never
is_transformer_engine_available = _never
is_transformer_engine_mxfp8_available = _never
is_bnb_available = _never
is_4bit_bnb_available = _never
is_8bit_bnb_available = _never
is_bitsandbytes_multi_backend_available = _never
# Devices without a backend.
is_amdsmi_available = _never
is_habana_gaudi1 = _never
is_hpu_available = _never
is_mlu_available = _never
is_musa_available = _never
is_neuron_available = _never
is_npu_available = _never
is_sdaa_available = _never
is_xccl_available = _never
is_xpu_available = _never
# Trackers that are refused.
is_aim_available = _never
is_clearml_available = _never
is_comet_ml_available = _never
is_dvclive_available = _never
is_swanlab_available = _never
# A prepared loader knows its position without torchdata's.
is_torchdata_stateful_dataloader_available = _never


def is_mlflow_available() -> bool:
    """Whether mlflow, or its light edition, is installed."""
    return _installed("mlflow")() or _installed("mlflow", "mlflow-skinny")()


def is_rich_available() -> bool:
    """Whether ACCELERATE_ENABLE_RICH asks for coloured tracebacks."""
    return _installed("rich")() and parse_flag_from_env("ACCELERATE_ENABLE_RICH", False)


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is at least of this version."""
    return compare_versions("numpy", ">=", min_version)


def is_weights_only_available() -> bool:
    """Whether torch loads files without running what is in them: every torch that works here."""
    return True


def is_torch_distributed_available() -> bool:
    """Whether torch was built with its process groups."""
    return hasattr(torch._C, "_c10d_init")


@cache
def _finds(backend: str) -> bool:
    return isinstance(probe.get(backend).probe(), Found)


def is_cuda_available() -> bool:
    """Whether there is a GPU that works."""
    return _finds("cuda")


def is_rocm_available() -> bool:
    """Whether the GPU that works is AMD's."""
    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether this is a Mac whose GPU works."""
    return _finds("mps")


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed and fronts a TPU."""
    return USE_TORCH_XLA and not check_is_gpu and find_spec("torch_xla") is not None


@cache
def _computes_in(dtype: str, needs_scaler: bool) -> bool:
    backend = probe.choose(environment.read().wishes.device)
    found = backend.capabilities(backend.device(0))
    return dtype in found.dtypes and (found.scales_gradients or not needs_scaler)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the device that a run would take computes in bfloat16."""
    if ignore_tpu and (_finds("tpu") or _finds("xla")):
        return False
    return _computes_in("bfloat16", needs_scaler=False)


def is_fp16_available() -> bool:
    """Whether the device that a run would take trains in float16."""
    return _computes_in("float16", needs_scaler=True)


def deepspeed_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that refuses in DeepSpeed's name when it is called."""
    return _refusing(func, "utils.dataclasses", "DeepSpeedPlugin")


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that refuses in torchao's name when it is called."""
    return _refusing(func, "utils.ao", "convert_model_to_fp8_ao")


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    """Whether a library is installed; public packages ask for theirs by this name of HF's."""
    return _installed(pkg_name, metadata_name)()


def _refusing(func: Callable[..., Any], home: str, name: str) -> Callable[..., Any]:
    @wraps(func)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        raise refusal(func.__name__, names(home)[name])

    return refusing


__all__ = [name for name in dict(vars()) if name.startswith("is_") or name.endswith("_required")]
