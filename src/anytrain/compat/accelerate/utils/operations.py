"""HF's functions over nested lists, tuples and dicts of tensors, for the current run."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.utils.dataclasses import TensorInformation
from anytrain.core.errors import BadInput, BadType, Notice, ShapesDiffer
from anytrain.doors.accelerator.states import live_session
from anytrain.engine import collect
from anytrain.engine.assemble.session import Session
from anytrain.engine.precision import to_float32
from anytrain.engine.tree import batch_size, join_rows, leaves, map_tensors, rows

__all__ = [
    "CannotPadNestedTensorWarning",
    "GatheredParameters",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]

__getattr__ = refused.module_getattr(__name__)

DistributedOperationException = ShapesDiffer

# The numbers under which HF sends a dtype's name.
TENSOR_TYPE_TO_INT = {
    torch.float: 1,
    torch.double: 2,
    torch.half: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


class CannotPadNestedTensorWarning(Notice):
    """A nested tensor has no one length to pad to."""


def is_torch_tensor(tensor: Any) -> bool:
    """Whether this is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether this is a tensor on an XPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether this is a tensor less its values."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether this is a tuple with named fields."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the generated values in a container of the type of `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return the nested data with `func` applied to each leaf that passes `test_type`."""

    def walk(node: Any) -> Any:
        if isinstance(node, (tuple, list)):
            return honor_type(node, [walk(item) for item in node])
        if isinstance(node, Mapping):
            return type(node)({key: walk(item) for key, item in node.items()})  # type: ignore[call-arg]  # a mapping of HF's kind is made from a dict
        if test_type(node):
            return func(node, *args, **kwargs)
        if error_on_other_type:
            raise BadType(
                f"Unsupported types ({type(node)}) passed to `{func.__name__}`.",
                why=f"every leaf must pass `{test_type.__name__}`.",
                fix="pass nested lists, tuples and dicts of such leaves alone.",
            )
        return node

    return walk(data)


def send_to_device(
    tensor: Any,
    device: Any,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """Return the nested data on the device; values under `skip_keys` stay where they are."""
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    if isinstance(tensor, torch.Tensor) or not hasattr(tensor, "to"):
        return map_tensors(
            lambda t: t.to(device, non_blocking=non_blocking), tensor, skip_keys=skipped
        )
    try:
        return tensor.to(device, non_blocking=non_blocking)
    except TypeError:  # its own `to` takes a device alone
        return tensor.to(device)


def get_data_structure(data: Any) -> Any:
    """Return the nested data with each tensor's shape and dtype in its place."""
    return map_tensors(lambda t: TensorInformation(shape=t.shape, dtype=t.dtype), data)


def get_shape(data: Any) -> Any:
    """Return the nested data with each tensor's shape, as a list, in its place."""
    return map_tensors(lambda t: list(t.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return empty tensors for what `get_data_structure` returned."""
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def find_batch_size(data: Any) -> int:
    """Return the length of the first tensor's first dimension, or refuse data without one."""
    found = batch_size(data)
    if found is None:
        raise BadInput(
            f"Cannot find a batch size in a {type(data).__name__}.",
            why="it holds no tensor with a first dimension.",
            fix="pass tensors, or nested lists, tuples and dicts of them.",
        )
    return found


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor's first dimension; None where there is none."""
    return batch_size(data)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor; None where there is none."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, torch.Tensor)), None)


def listify(data: Any) -> Any:
    """Return the nested data with each tensor as a list of numbers."""
    return map_tensors(lambda t: t.detach().float().tolist() if _is_half(t) else t.tolist(), data)


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """Return the given rows of every tensor."""
    return rows(data, tensor_slice)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Return one nested structure whose tensors are the given ones', one after the other."""
    if len(data) == 1:
        return data[0]
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves(data)):
        raise BadType(
            "Cannot concatenate batches that hold other things than tensors.",
            why="which of two values should stay is not said.",
            fix="leave them out, or keep the batches in a list.",
        )
    return join_rows(list(data), dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return the batch with as many rows of zeros behind it as HF puts there."""
    num_rows = batch_size + _num_added(batch_size, num_processes)

    def pad(rows_of: torch.Tensor) -> torch.Tensor:
        shape = list(rows_of.shape)
        shape[dim] = num_rows
        padded = rows_of.new_zeros(shape)
        padded.narrow(dim, 0, rows_of.shape[dim]).copy_(rows_of)
        return padded

    return recursively_apply(pad, tensor, error_on_other_type=True)


def _num_added(batch_size: int, num_processes: int) -> int:
    """Return HF's number of rows: 7 over 4 processes become 10, which 4 do not divide."""
    each, left = divmod(batch_size, num_processes)
    if each == 0:
        return num_processes - batch_size
    added = num_processes - each
    return left - added if added < 1 else added


def convert_to_fp32(tensor: Any) -> Any:
    """Return the nested data with half-precision tensors widened to float32."""
    return to_float32(tensor)


class ConvertOutputsToFp32:
    """A forward whose outputs are widened to float32; it can be pickled."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the forward's outputs, widened."""
        return to_float32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        raise BadInput(
            "Cannot pickle a model whose outputs are widened to float32.",
            why="the widening was put around its forward and belongs to this run.",
            fix="unwrap it first: unwrap_model(model, keep_fp32_wrapper=False).",
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward with its half-precision outputs widened to float32."""
    widened = ConvertOutputsToFp32(model_forward)

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return widened(*args, **kwargs)

    return forward


def _checking(found: Session) -> bool:
    return found.environment.debug and found.world.size > 1


def gather(tensor: Any) -> Any:
    """Return every rank's tensors, joined along the first dimension."""
    found = live_session()
    if found.world.size == 1:
        return tensor
    return collect.gather(tensor, found.world, check=_checking(found))


def gather_object(object: Any) -> Any:
    """Return every rank's list in one list; in one process the object itself."""
    return collect.gather_objects(object, live_session().world)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return one rank's tensors on every rank."""
    found = live_session()
    if _checking(found):
        collect.check_shapes(tensor, found.world, "broadcast")
    return collect.broadcast(tensor, found.world, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill the list, in place, with one rank's values."""
    return collect.broadcast_object_list(object_list, live_session().world, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the sum, mean or maximum of every tensor over the ranks."""
    found = live_session()
    if _checking(found):
        collect.check_shapes(tensor, found.world, "reduce")
    return collect.reduce(tensor, found.world, reduction, scale)


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False
) -> Any:
    """Return the tensors padded to the longest rank's size along `dim`."""
    found = live_session()
    if any(getattr(leaf, "is_nested", False) for leaf in leaves(tensor)):
        warnings.warn(
            "A nested tensor cannot be padded, so nothing was; split it into its parts first.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
        return tensor
    if _checking(found):
        dims = map_tensors(lambda t: torch.empty([0] * t.ndim), tensor)
        collect.check_shapes(dims, found.world, "pad")
    return collect.pad_across(tensor, found.world, dim, pad_index, pad_first)


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Return the shape, and the number of the dtype, of a tensor that one rank alone has."""
    everyone = live_session().world.gather_object(
        None if tensor is None else (list(tensor.shape), TENSOR_TYPE_TO_INT[tensor.dtype])
    )
    shape, dtype = next(told for told in everyone if told is not None)
    return torch.tensor(shape), dtype


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return on every rank the tensor that one rank alone has; the others pass None."""
    found = live_session()
    owners = found.world.gather_object(tensor is not None)
    shape, dtype = gather_tensor_shape(tensor)
    if tensor is None:
        tensor = torch.empty(shape.tolist(), dtype=TENSOR_INT_TO_DTYPE[dtype], device=found.device)
    return found.world.broadcast(tensor, owners.index(True))


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Do nothing: every rank has every parameter whole."""
    yield


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a collective operation to compare the ranks' shapes first, in debug mode."""

    @functools.wraps(function)
    def verified(*args: Any, **kwargs: Any) -> Any:
        found = live_session()
        if _checking(found):
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            collect.check_shapes(next(iter(given.values())), found.world, function.__name__)
        return function(*args, **kwargs)

    return verified


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an operation made of others; an error of theirs names it too."""

    @functools.wraps(function)
    def chained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ShapesDiffer as error:
            raise ShapesDiffer(
                f"Cannot run {function.__name__}: {error.what}", why=error.why, fix=error.fix
            ) from error

    return chained
