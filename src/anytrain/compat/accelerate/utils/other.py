"""Odds and ends that scripts take from HF Accelerate: files, ports, names, wrapped models."""

from __future__ import annotations

import functools
import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.utils.modeling import id_tensor_storage
from anytrain.compat.accelerate.utils.versions import compare_versions
from anytrain.core.errors import BadInput
from anytrain.doors.accelerator.logging import get_logger
from anytrain.doors.accelerator.states import live_session
from anytrain.engine.checkpoint.model import export_object
from anytrain.engine.prepared import model as models

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "is_compiled_module",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
    "write_basic_config",
]

__getattr__ = refused.module_getattr(__name__)

logger = get_logger(__name__)

TORCH_SAFE_GLOBALS: list[Any] = []
"""What `load` trusts besides tensors and plain values: nothing."""

_DEFAULT_PORT = 29500
_OLDEST_GOOD_KERNEL = "5.5.0"  # older ones can hang in the loaders' shared memory


def wait_for_everyone() -> None:
    """Wait until every process is here."""
    live_session().world.barrier("wait_for_everyone()")


def save(
    obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object from the main process, or from each machine's, as torch.save does."""
    world = live_session().world
    if (world.local_rank if save_on_each_node else world.rank) != 0:
        return
    if safe_serialization and isinstance(obj, dict):
        obj = clean_state_dict_for_safetensors(dict(obj))
    if hasattr(f, "write"):
        torch.save(obj, f)
    else:
        export_object(obj, Path(f), safe_serialization=safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return what torch.load reads; nothing in the file is run unless `weights_only=False`."""
    kwargs.setdefault("weights_only", True)
    return torch.load(f, map_location=map_location, **kwargs)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the weights with each shared tensor once, under its first name."""
    first: dict[Any, str] = {}
    kept, removed = {}, []
    for name, tensor in state_dict.items():
        if isinstance(tensor, torch.Tensor):
            owner = first.setdefault(id_tensor_storage(tensor), name)
            if owner != name:
                removed.append(f"{name} (saved as {owner})")
                continue
            tensor = tensor.contiguous()
        kept[name] = tensor
    if removed:
        logger.warning(f"Removed shared tensor {', '.join(removed)}: a file holds each one once.")
    return kept


def extract_model_from_parallel(
    model: Any,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> Any:
    """Return the model inside its wrappers; `recursive` unwraps its parts as well."""
    inner = models.unwrap(
        model, live_session().strategy, keep_forward=keep_fp32_wrapper, keep_compiled=False
    )
    inner = _unwrap_parts(inner) if recursive else inner
    if not keep_fp32_wrapper:
        _restore_forward(inner)
    if keep_torch_compile and hasattr(model, "_orig_mod"):
        model.__dict__["_orig_mod"] = inner
        if "_modules" in model.__dict__ and "_orig_mod" in model._modules:
            model._modules["_orig_mod"] = inner
        return model
    return inner


def _unwrap_parts(module: nn.Module) -> nn.Module:
    inner = module
    while isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module  # type: ignore[assignment]  # a wrapper keeps the model under this name
    for name, child in inner.named_children():
        setattr(inner, name, _unwrap_parts(child))
    return inner


def _restore_forward(model: nn.Module) -> None:
    """Undo a `forward` put on the instance by code that kept the one below, as HF does."""
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    del model.__dict__["forward"]
    if getattr(original, "__func__", original) is not type(model).forward:
        model.__dict__["forward"] = original


def is_compiled_module(module: nn.Module) -> bool:
    """Whether torch.compile made this module."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether a part of the module was made by torch.compile."""
    return any(is_compiled_module(part) for part in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether this is a list of blocks of one class, such as a transformer's layers."""
    if not isinstance(module, nn.ModuleList) or len(module) == 0:
        return False
    return all(isinstance(block, type(module[0])) for block in module)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether a list of blocks of one class is anywhere inside."""
    return any(is_repeated_blocks(part) for part in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a twin of the module, with its weights, whose repeated blocks are compiled.

    One block is compiled and the others reuse it; what is left is compiled part by part.
    """
    twin = _compiled_twin(module, compile_kwargs)
    twin.__dict__.setdefault("_orig_mod", module)  # where unwrapping finds the module again
    return twin


def _compiled_twin(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    if is_repeated_blocks(module):
        assert isinstance(module, nn.ModuleList)
        return nn.ModuleList([models.compiled(block, options) for block in module])
    if not has_repeated_blocks(module):
        return models.compiled(module, options)
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__, _modules={})
    for name, value in module.__dict__.items():
        if getattr(value, "__self__", None) is module:  # a method bound to the instance
            twin.__dict__[name] = value.__func__.__get__(twin)
    for name, child in module.named_children():
        twin.add_module(name, _compiled_twin(child, options))
    return twin


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter is spread over processes."""
    return any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return over how many processes transformers has split the model; None where it has not."""
    size = getattr(model, "tp_size", None)
    if size is not None:
        return int(size)
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    size = config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)
    return None if size is None else int(size)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return every module after the ones inside it, the model itself last."""
    found = list(model.named_modules(remove_duplicate=False))[::-1]
    return found if return_fqns else [module for _, module in found]


def get_pretty_name(obj: Any) -> str:
    """Return a name for an object, or for its class.

    >>> get_pretty_name(dict), get_pretty_name({})
    ('dict', 'dict')
    """
    for candidate in (obj, type(obj)):
        for attribute in ("__qualname__", "__name__"):
            if hasattr(candidate, attribute):
                return str(getattr(candidate, attribute))
    return str(obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the source's values into the destination, dict by dict; return the destination.

    >>> merge_dicts({"a": {"x": 1}}, {"a": {"y": 2}})
    {'a': {'y': 2, 'x': 1}}
    """
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute of an attribute, such as `config.hidden.size`."""
    return functools.reduce(getattr, attr.split("."), obj)


def is_port_in_use(port: int | None = None) -> bool:
    """Whether a program listens on this port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        return trial.connect_ex(("localhost", _DEFAULT_PORT if port is None else int(port))) == 0


def get_free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.bind(("", 0))
        return int(trial.getsockname()[1])


def convert_bytes(size: float) -> str:
    """Return a size with the largest unit that leaves at least 1.

    >>> convert_bytes(2048), convert_bytes(5 * 1024**3)
    ('2.0 KB', '5.0 GB')
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def check_os_kernel() -> None:
    """Warn of a Linux kernel so old that loaders are known to hang on it."""
    info = platform.uname()
    release = re.match(r"\d+\.\d+\.\d+", info.release)
    if info.system != "Linux" or release is None:
        return
    from torch.torch_version import TorchVersion

    if compare_versions(TorchVersion(release[0]), "<", _OLDEST_GOOD_KERNEL):
        logger.warning(
            f"This kernel is {release[0]}; before {_OLDEST_GOOD_KERNEL} processes may hang."
        )


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | bool:
    """Write a launch configuration for this machine; False where the file exists already."""
    from anytrain.doors.launch import config, target
    from anytrain.doors.launch.options import LaunchOptions, check

    if save_location is None:
        raise BadInput(
            "Cannot tell where the configuration should go.",
            why="anytrain keeps no hidden configuration: `anytrain launch` reads the file it is "
            "given with --config_file.",
            fix='pass save_location="launch.yaml".',
        )
    path = Path(save_location)
    if path.exists():
        return False
    chosen = target.choose_target(LaunchOptions().wishes(), None)
    options = LaunchOptions(
        num_processes=chosen.num_processes,
        mixed_precision=mixed_precision.lower(),
        cpu=chosen.backend.name == "cpu" or None,
        multi_gpu=(chosen.backend.name == "cuda" and chosen.num_processes > 1) or None,
        tpu=chosen.backend.name in ("tpu", "xla") or None,
    )
    check(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    config.write(options, os.fspath(path))
    return path
