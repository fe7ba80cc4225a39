"""Look at a model's tensors, move one, and load weights; spreading a model is refused."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.utils.constants import (
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from anytrain.compat.accelerate.utils.dataclasses import CustomDtype
from anytrain.core import documents
from anytrain.core.errors import BadInput, CheckpointError
from anytrain.doors.accelerator.logging import get_logger
from anytrain.doors.accelerator.options import changed
from anytrain.doors.accelerator.states import live_session
from anytrain.engine.checkpoint.model import size_in_bytes

__all__ = [
    "align_module_device",
    "calculate_maximum_sizes",
    "check_tied_parameters_in_config",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
    "has_4bit_bnb_layers",
    "has_ao_layers",
    "has_offloaded_params",
    "has_transformer_engine_layers",
    "id_tensor_storage",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]

__getattr__ = refused.module_getattr(__name__)

logger = get_logger(__name__)

Device = int | str | torch.device


def is_peft_model(model: nn.Module) -> bool:
    """Whether peft has put adapters on the model."""
    return any(kind.__name__ == "PeftModel" for kind in type(_inside(model)).__mro__)


def _inside(model: nn.Module) -> Any:
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two names mean one device: "cuda" is "cuda:0"."""
    if first_device.type != second_device.type or first_device.type == "cpu":
        return first_device.type == second_device.type
    return (first_device.index or 0) == (second_device.index or 0)


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes; "8Gb" with a small b counts bits.

    >>> convert_file_size_to_int("1MiB"), convert_file_size_to_int("8Kb")
    (1048576, 1000)
    """
    found = size_in_bytes(size)
    if found < 0:
        raise BadInput(
            f"Cannot read the size {size!r}.",
            why="a size is not less than nothing.",
            fix='write "10GB" or "500MiB", or pass a number of bytes.',
        )
    in_bits = isinstance(size, str) and size.strip().endswith("b") and "ib" not in size.lower()
    return found // 8 if in_bits else found


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return the bytes that one number of this dtype takes on disk; a truth value takes a bit."""
    small = {torch.bool: 1 / 8, CustomDtype.INT2: 1 / 4, CustomDtype.INT4: 1 / 2}
    if dtype in small:
        return small[dtype]
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 1


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what tells a tensor's memory from another's."""
    storage = tensor.untyped_storage()
    return tensor.device, 0 if tensor.is_meta else storage.data_ptr(), storage.nbytes()


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the module's parameters, then its buffers, with their names."""
    yield from module.named_parameters(recurse=recurse)
    left_out: set[str] = set()
    if remove_non_persistent:
        left_out = get_non_persistent_buffers(module, recurse=recurse)
    for name, buffer in module.named_buffers(recurse=recurse) if include_buffers else ():
        if name not in left_out:
            yield name, buffer


def get_non_persistent_buffers(
    module: nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    """Return the names of buffers that a state dict leaves out; `fqns` puts the path before."""
    found: set[str] = set(module._non_persistent_buffers_set)
    for path, part in module.named_modules() if recurse else ():
        prefix = f"{path}." if fqns and path else ""
        found |= {prefix + name for name in part._non_persistent_buffers_set}
    return found


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a transformers model says that some of its weights should be tied."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    whole: Any = model
    return bool(
        (getattr(text, "tie_word_embeddings", False) and whole.get_output_embeddings() is not None)
        or (
            getattr(config, "is_encoder_decoder", False)
            and getattr(config, "tie_encoder_decoder", False)
        )
        or any(hasattr(part, "_tie_weights") for part in model.modules())
    )


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of parameters that are one tensor, group by group.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> model[1].weight = model[0].weight
    >>> find_tied_parameters(model)
    [['0.weight', '1.weight']]
    """
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Make each group one tensor again: the first of it that has values."""
    for group in map(list, tied_params):
        held = [getattr(*_owner(model, name)) for name in group]
        shared = next((tensor for tensor in held if not tensor.is_meta), None)
        for name in group if shared is not None else ():
            setattr(*_owner(model, name), shared)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def compute_module_sizes(
    model: nn.Module,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> dict[str, float]:
    """Return the bytes of every module and tensor by name, the whole model under "".

    `dtype` is what floating-point numbers would be converted to, if it is smaller.
    """
    special = {
        name: dtype_byte_size(_get_proper_dtype(kind))
        for name, kind in (special_dtypes or {}).items()
    }
    sizes: dict[str, float] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        each = dtype_byte_size(tensor.dtype)
        if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
            each = min(each, dtype_byte_size(_get_proper_dtype(dtype)))
        size = tensor.numel() * special.get(name, each)
        parts = name.split(".")
        for length in range(len(parts) + 1):
            sizes[".".join(parts[:length])] += size
    return sizes


def _get_proper_dtype(dtype: Any) -> Any:
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None
) -> float:
    """Return the bytes of all buffers."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def calculate_maximum_sizes(model: nn.Module) -> tuple[float, tuple[float, list[str]]]:
    """Return the bytes of the model, and of its largest layer with the names of its class."""
    sizes = compute_module_sizes(model)
    whole = set(getattr(model, "_no_split_modules", None) or ())
    largest: tuple[float, list[str]] = (0, [])
    waiting: list[tuple[str, Any]] = list(
        itertools.chain(named_module_tensors(model), model.named_children())
    )
    while waiting:
        name, part = waiting.pop(0)
        inside = [] if isinstance(part, torch.Tensor) else list(part.named_children())
        if inside and type(part).__name__ not in whole:
            own = [*part.named_parameters(recurse=False), *inside]
            waiting = [(f"{name}.{inner}", child) for inner, child in own] + waiting
        elif sizes[name] > largest[0]:
            largest = (sizes[name], [type(part).__name__])
        elif sizes[name] == largest[0] and type(part).__name__ not in largest[1]:
            largest[1].append(type(part).__name__)
    return sizes[""], largest


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: Any = None,
    fp16_statistics: Any = None,
    tied_params_map: Any = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one parameter or buffer on a device, with a new value if one is given."""
    owner, name = _owner(module, tensor_name)
    if name not in owner._parameters and name not in owner._buffers:
        raise BadInput(
            f"Cannot move {tensor_name}.",
            why=f"{type(owner).__name__} has no parameter or buffer named {name}.",
            fix="use a name of named_module_tensors(module, recurse=True).",
        )
    old = getattr(owner, name)
    _check_value(name, old, device, value)
    new = old.detach() if value is None else value.detach()
    if value is not None or torch.device(device).type == "meta":
        wanted = old.dtype if dtype is None else _get_proper_dtype(dtype)
        keep = dtype is not None and not new.is_floating_point()
        new = new if keep else new.to(wanted)
    new = new.to(device, non_blocking=non_blocking)
    if name in owner._buffers:
        owner._buffers[name] = new
    elif value is not None or not check_device_same(torch.device(device), old.device):
        owner._parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)


def _check_value(name: str, old: torch.Tensor, device: Device, value: torch.Tensor | None) -> None:
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise BadInput(
            f"Cannot put {name} on {device}.",
            why="it is on the meta device: it has a shape and no values.",
            fix="pass value= a tensor of that shape.",
        )
    if value is not None and value.shape != old.shape:
        raise BadInput(
            f"Cannot set {name} to a tensor of shape {tuple(value.shape)}.",
            why=f"it has the shape {tuple(old.shape)}.",
            fix="check that the weights are this model's.",
        )


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: Any = None) -> Any:
    """Return the weights in a safetensors or torch file; nothing in the file is run."""
    _check_device_map(device_map)
    path = os.fspath(checkpoint_file)
    if not path.endswith(".safetensors"):
        return torch.load(path, map_location="cpu", weights_only=True)
    from safetensors.torch import load_file

    return load_file(path)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Device] | None = None,
    offload_folder: Any = None,
    dtype: Any = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights from a file, an index of shards, or a folder with either, into the model.

    With `device_map={"": device}` each tensor goes to that device, and to `dtype` if given.
    """
    _check_device_map(device_map)
    known = set(model.state_dict())
    tied = find_tied_parameters(model)
    unused: set[str] = set()
    for file in _weight_files(Path(checkpoint)):
        weights = load_state_dict(file)
        unused |= set(weights) - known
        if device_map is None:
            model.load_state_dict(weights, strict=strict)
        else:
            _set_all(model, {k: v for k, v in weights.items() if k in known}, device_map[""], dtype)
    if unused and strict:
        raise RuntimeError(f"The model has no {', '.join(sorted(unused))}.")
    if unused:
        logger.warning(
            f"Weights in {checkpoint} were not used when loading {type(model).__name__}, which "
            f"has no {', '.join(sorted(unused))}."
        )
    retie_parameters(model, tied)


def _set_all(model: nn.Module, weights: Mapping[str, Any], device: Device, dtype: Any) -> None:
    for name, value in weights.items():
        set_module_tensor_to_device(model, name, device, value=value, dtype=dtype)


def _check_device_map(device_map: Any) -> None:
    """Refuse to spread a model; one device for all of it is no spreading."""
    if device_map is not None and set(device_map) != {""}:
        raise refused.refusal("device_map", refused.names("big_modeling")["dispatch_model"])


def _weight_files(checkpoint: Path) -> list[Path]:
    if checkpoint.is_dir():
        for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME):
            if (checkpoint / name).is_file():
                return [checkpoint / name]
        indexes = sorted(checkpoint.glob("*.index.json"))
        if len(indexes) != 1:
            raise BadInput(
                f"Cannot load weights from {checkpoint}.",
                why=f"it holds no {SAFE_WEIGHTS_NAME}, no {WEIGHTS_NAME}, and {len(indexes)} "
                "indexes of shards.",
                fix="pass the file itself.",
            )
        checkpoint = indexes[0]
    if not checkpoint.is_file():
        raise BadInput(
            f"Cannot load weights from {checkpoint}.",
            why="there is no such file or folder.",
            fix="pass a file of weights, an index of shards, or a folder with either.",
        )
    if checkpoint.suffix != ".json":
        return [checkpoint]
    index = _index(checkpoint)
    shards = set(index.get("weight_map", index).values())
    return [checkpoint.parent / Path(name).name for name in sorted(shards)]


def _index(path: Path) -> dict[str, Any]:
    try:
        found = documents.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        found = error
    if isinstance(found, dict):
        return found
    raise CheckpointError(
        f"Cannot load weights from {path}.",
        why=f"it is not an index of shards: {found}.",
        fix="pass a file of weights, an index of shards, or a folder with either.",
    )


def has_ao_layers(model: nn.Module) -> bool:
    """Whether the model has layers of torchao's fp8 training."""
    return any(type(part).__module__.startswith("torchao.float8") for part in model.modules())


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether the model has 4-bit layers of bitsandbytes."""
    return any(
        type(part).__name__ == "Linear4bit" and type(part).__module__.startswith("bitsandbytes")
        for part in model.modules()
    )


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether the model has layers of Transformer Engine."""
    return any(type(part).__module__.startswith("transformer_engine") for part in model.modules())


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Return the context that the current run's precision computes in."""
    if not native_amp:
        return nullcontext()
    return live_session().precision.autocast(changed(autocast_kwargs))


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for the current run's device."""
    return torch.amp.GradScaler(live_session().device.type, **kwargs)


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether the library that loaded the module keeps its weights elsewhere until it runs."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: torch.device | None = None
) -> Iterator[None]:
    """Have the module's own parameters on a device inside the block."""
    if execution_device is None:
        yield
        return
    before = {name: p.device for name, p in module.named_parameters(recurse=False)}
    for name in before:
        set_module_tensor_to_device(module, name, execution_device)
    try:
        yield
    finally:
        for name, device in before.items():
            set_module_tensor_to_device(module, name, device)
