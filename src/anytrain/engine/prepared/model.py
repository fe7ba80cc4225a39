"""A model on its device, in its precision, tied to the other ranks' copies.

In one process and full precision `prepare(model) is model`. Mixed precision replaces `forward`
on the instance, once and reversibly (a row of core/patches.py).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import nn

from anytrain.core import bytecode, patches
from anytrain.core.errors import BadInput
from anytrain.engine.precision import Precision, to_float32
from anytrain.machine.strategies.base import Strategy

_ORIGINAL = "_anytrain_original_forward"
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def cast_forward(model: nn.Module, precision: Precision) -> None:
    """Run the model's forward under autocast and return its outputs in float32."""
    if not precision.is_mixed or _ORIGINAL in model.__dict__:
        return
    original: Any = model.forward
    is_method = getattr(original, "__self__", None) is model
    plain = original.__func__ if is_method else original

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            outputs = plain(*args, **kwargs)
        return to_float32(outputs)

    had_own = "forward" in model.__dict__
    model.__dict__[_ORIGINAL] = original if had_own else None
    # As a method it goes along with a deep copy, which computes with weights of its own.
    model.__dict__["forward"] = types.MethodType(forward, model) if is_method else forward


def replace_forward(model: nn.Module, instead: Callable[..., Any]) -> None:
    """Run this model's forward, but no copy's, by another function of the same arguments."""
    before: Any = model.forward
    plain = before.__func__ if getattr(before, "__self__", None) is model else None

    @wraps(plain or before)
    def forward(own: Any, *args: Any, **kwargs: Any) -> Any:
        if own is not model and plain is not None:
            return plain(own, *args, **kwargs)
        return instead(*args, **kwargs)

    model.__dict__.setdefault(_ORIGINAL, model.__dict__.get("forward"))
    model.__dict__["forward"] = types.MethodType(forward, model)


def restore_forward(model: nn.Module) -> None:
    """Undo `cast_forward` and `replace_forward`."""
    if _ORIGINAL in model.__dict__:
        original = model.__dict__.pop(_ORIGINAL)
        del model.__dict__["forward"]
        if original is not None:
            model.__dict__["forward"] = original


def move(model: nn.Module, device: torch.device) -> dict[int, nn.Parameter]:
    """Put the model on the device; return the parameters that had to be made anew, by old id.

    A parameter stays the object that it is, so that whoever holds it goes on holding it. Only one
    that a weak reference looks at cannot, where the device's tensors are of another kind.
    """
    places = [
        (owner, name, parameter)
        for owner in model.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]
    hooks = [tuple(getattr(parameter, kind) for kind in _HOOKS) for _, _, parameter in places]
    kinds = {parameter.device.type: parameter for _, _, parameter in places}
    swaps = any(_is_of_another_kind(parameter, device) for parameter in kinds.values())
    try:
        with _swapping() if swaps else nullcontext():
            model.to(device)
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        model.to(device)
    moved: dict[int, nn.Parameter] = {}  # a tied one is made anew once for each of its names
    for owner, name, old in places:
        new = owner._parameters[name]
        if new is not None and new is not old:
            owner._parameters[name] = moved.setdefault(id(old), new)
    for (owner, name, _), both in zip(places if swaps else (), hooks, strict=False):
        for kind, held in zip(_HOOKS, both, strict=True):
            if held:  # they stay behind with the tensor that was there
                setattr(owner._parameters[name], kind, held)
    return moved


def _is_of_another_kind(parameter: nn.Parameter, device: torch.device) -> bool:
    """Whether torch would make a parameter anew to move it there, as it does for torch_xla."""
    if parameter.device.type == device.type:
        return False
    there = torch.empty(0, device=device)
    return not torch._has_compatible_shallow_copy_type(parameter, there)


@contextmanager
def _swapping() -> Iterator[None]:
    """Let a module's parameters take other tensors' places inside the block."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def unwrap(
    model: nn.Module,
    strategy: Strategy,
    *,
    keep_forward: bool = True,
    keep_compiled: bool = True,
) -> nn.Module:
    """Return the model that was given to `prepare`."""
    compiled: nn.Module | None = None
    if hasattr(model, "_orig_mod"):
        compiled, model = model, model._orig_mod  # type: ignore[assignment]  # torch.compile's wrapper
    inner = strategy.original(model)
    while isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = inner.module  # the user's own wrapper
    if hasattr(inner, "_orig_mod"):
        compiled, inner = inner, inner._orig_mod  # type: ignore[assignment]  # torch.compile's wrapper
    if not keep_forward:
        restore_forward(inner)
    if keep_compiled and compiled is not None:
        compiled._orig_mod = inner
        return compiled
    return inner


def holds_device_map(model: nn.Module) -> bool:
    """Whether the model was already spread over several devices by its loader."""
    spread = getattr(model, "hf_device_map", None) or {}
    return len(set(spread.values())) > 1


def is_offloaded(model: nn.Module) -> bool:
    """Whether the model's loader keeps some layers in host memory or on disk."""
    spread = getattr(model, "hf_device_map", None) or {}
    return any(str(place) in ("cpu", "disk") for place in spread.values())


def is_quantized(model: nn.Module) -> bool:
    """Whether the model's loader has put 8-bit or 4-bit weights in it."""
    return bool(
        getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    )


def check_dense(model: nn.Module, backend: str) -> None:
    """Refuse embeddings whose gradients are sparse on torch_xla, which has no sparse tensors."""
    for name, module in model.named_modules() if backend == "xla" else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise BadInput(
                f"Cannot train {name or type(module).__name__!r} on {backend!r}.",
                why=f"it was made with sparse=True, and {backend} has no sparse gradients.",
                fix=f"make it with sparse=False: {backend} compiles a dense update.",
            )


def compiled(model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """Return the model compiled by torch."""
    result: Any = torch.compile(model, **options)
    prepared: nn.Module = result
    return prepared


_LIBRARIES = ("torch", "transformers", "anytrain", "peft", "numpy")
_THEIRS = "torch.distributed"
_DEPTH = 3


def meets_other_ranks(model: nn.Module) -> bool:
    """Whether code of the model's that is no library's uses torch.distributed.

    Such a model gathers what all ranks compute: they must have batches of one shape.
    """
    kinds: set[Any] = {type(module) for module in model.modules()}
    return any(_uses(kind, _DEPTH) for kind in kinds)


@lru_cache(maxsize=1024)
def _uses(thing: Any, depth: int) -> bool:
    """Whether a class or a function of the user's, or one that it calls, uses torch.distributed."""
    if depth == 0 or str(thing.__module__).partition(".")[0] in _LIBRARIES:
        return False
    functions = vars(thing).values() if isinstance(thing, type) else [thing]
    return any(_is_theirs(value) or _goes_on(value, depth) for value in _named(functions))


def _named(functions: Any) -> Iterator[Any]:
    """Yield what functions name of their module's, and `torch.distributed` where it is spelled."""
    for each in functions:
        plain = getattr(each, "__func__", each)
        if not isinstance(plain, types.FunctionType):
            continue
        for name in bytecode.names(plain):
            if name in plain.__globals__:
                yield plain.__globals__[name]
            elif name == "distributed":  # torch.distributed.all_gather(...)
                yield _THEIRS


def _is_theirs(value: Any) -> bool:
    is_module = isinstance(value, types.ModuleType)
    home = (
        value
        if isinstance(value, str)
        else getattr(value, "__name__" if is_module else "__module__", None)
    )
    return str(home).startswith(_THEIRS)


def _goes_on(value: Any, depth: int) -> bool:
    return isinstance(value, (types.FunctionType, type)) and _uses(value, depth - 1)


_MODULE = "transformers.masking_utils"


def values_unread(device_type: str) -> AbstractContextManager[None]:
    """Keep transformers from reading the values of masks on a device that traces, in the block.

    To read one runs a graph and waits, in each forward pass; and a mask that hides nothing would
    be left out, which is another graph.
    """
    return patches.shared("mask values", lambda: _leave_unread(device_type))


def _leave_unread(device_type: str) -> Callable[[], None] | None:
    module: Any = sys.modules.get(_MODULE)
    own = getattr(module, "is_tracing", None)
    if own is None:
        return None

    def is_tracing(tensor: Any = None) -> Any:
        device = getattr(tensor, "device", None)
        return own(tensor) if device is None else device.type == device_type or own(tensor)

    module.is_tracing = is_tracing
    return lambda: setattr(module, "is_tracing", own)
