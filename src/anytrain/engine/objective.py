"""What a step's loss is: the mean over its items, however many micro-batches and ranks share it.

A model's own loss is the mean over its micro-batch. Weighted by the items it was taken over, the
losses of a step add up to the step's mean, for any model and any way of cutting the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytrain.core import bytecode
from anytrain.core.errors import BadInput
from anytrain.engine.tree import batch_size, leaves

IGNORED = -100
"""The label that no loss counts."""
_MOST_SHOWN = 60
_NO_TENSORS = (type(None), str, bytes, int, float)
_SHIFTING = ("ForCausalLM", "ForConditionalGeneration")


class OtherArguments(BadInput, TypeError):
    """A list of as many entries as a model's forward does not take."""


def call(model: nn.Module, inputs: Any) -> Any:
    """Run the model on a batch: a mapping by name, a list or tuple by place, else as it is."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    by_place = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
    if any(isinstance(each, torch.Tensor) for each in by_place):
        try:
            return model(*by_place)
        except TypeError as error:
            _check_places(model, inputs, error)
            raise
    return _call_with_odd(model, inputs, by_place)


def _check_places(model: nn.Module, inputs: Any, error: TypeError) -> None:
    """Refuse a list of more entries than forward has arguments, or of fewer."""
    inner = getattr(model, "module", model)
    if not isinstance(inputs, (list, tuple)) or not inputs:
        return
    signature = inspect.signature(inner.forward)
    try:
        signature.bind(*inputs)
    except TypeError:
        raise OtherArguments(
            f"Cannot run the model on this batch: the data_collator returned a "
            f"{type(inputs).__name__} of {len(inputs)}, the first {_shape(inputs[0])}.",
            why="the entries of a list are forward's arguments by their place (positional "
            f"arguments), and {type(inner).__name__}.forward takes "
            f"({', '.join(signature.parameters)}).",
            fix="let the data_collator return a dict of tensors, with the names that the model's "
            "forward has.",
        ) from error


def _call_with_odd(model: nn.Module, inputs: Any, by_place: Sequence[Any]) -> Any:
    """Run the model on a batch of no tensors, which some take; of one that fails, say why."""
    try:
        return model(*by_place)
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(error, TypeError):
            _check_places(model, inputs, error)
        if not all(isinstance(leaf, _NO_TENSORS) for leaf in leaves(inputs)):
            raise  # an object of somebody's own may hold tensors
        shown = repr(inputs)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        raise BadInput(
            "Cannot run the model on a batch without a tensor: the data_collator returned "
            f"{_shape(inputs)}, {shown}.",
            why=f"the model failed on it: {error}.",
            fix="let the data_collator return a dict of tensors, with the names that the model's "
            "forward has.",
        ) from error


def given_loss(outputs: Any) -> torch.Tensor | None:
    """Return the loss that a model gave: by its name, as its first value, or as all it gave."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, (list, tuple)) and outputs:
        found = outputs[0]
    is_loss = isinstance(found, torch.Tensor) and (found.ndim == 0 or isinstance(outputs, Mapping))
    return found if is_loss else None


def loss_of(
    outputs: Any, inputs: Any, left_out: Callable[[], Sequence[str]] = tuple
) -> torch.Tensor:
    """Return the loss that a model gave, or say what it gave instead.

    `left_out` returns the columns of the data set that the model was not given.
    """
    loss = given_loss(outputs)
    if loss is not None:
        return loss
    is_tuple = isinstance(outputs, (list, tuple)) and outputs
    found = outputs[0] if is_tuple else outputs
    given = f"the keys {', '.join(outputs)}" if isinstance(outputs, Mapping) else _shape(found)
    taken = ", ".join(inputs) if isinstance(inputs, Mapping) else _shape(inputs)
    if dropped := ", ".join(left_out()):
        taken += f" (dropped {dropped}, which it does not take)"
    raise BadInput(
        "The model did not return a loss.",
        why=f"it returned {given}; it was given {taken}.",
        fix="give the data set a column with the labels under the name that the model's forward "
        "has, as numbers (texts do not come into a batch), return the loss first (or under "
        "'loss'), or pass compute_loss_func.",
    )


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def num_items(batch: Any, *, shifted: bool = False) -> torch.Tensor | int:
    """Return how many items a micro-batch's loss is the mean of; nobody waits for the device.

    Labels that are whole numbers count where they are not IGNORED; otherwise samples count.
    `shifted` is for losses that predict the next label: the first of a row is no item.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, torch.Tensor) and labels.ndim and not labels.is_floating_point():
        counted = labels[..., 1:] if shifted and labels.ndim > 1 else labels
        return (counted != IGNORED).sum()
    rows = batch_size(batch)
    return 1 if rows is None else rows


def share(own: torch.Tensor | int, whole: torch.Tensor | int, ranks: int) -> torch.Tensor:
    """Return the weight of one micro-batch's loss; gradients are averaged over ranks later."""
    return own * ranks / torch.as_tensor(whole).clamp(min=1).to(torch.float32)


def some(loss: torch.Tensor, inputs: Any, *, shifted: bool = False) -> torch.Tensor:
    """Return the loss, or nothing where not one label of the batch counts: its mean is NaN then."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, torch.Tensor) or not labels.ndim or labels.is_floating_point():
        return loss  # its items are samples, and there is one
    if labels.device.type == "cpu" and _has_counted(labels):
        return loss
    own = num_items(inputs, shifted=shifted)
    return torch.where(torch.as_tensor(own) > 0, loss, 0.0)


def _has_counted(labels: torch.Tensor) -> bool:
    """Whether one of these labels, which the host can read at once, is an item in any case."""
    counted = labels[..., 1:] if labels.ndim > 1 else labels
    return counted.numel() > 0 and counted.max().item() > IGNORED


def weighed(
    loss: torch.Tensor, own: torch.Tensor | int, whole: torch.Tensor | int, ranks: int
) -> torch.Tensor:
    """Return a micro-batch's share of the step's loss; where it holds no item, nothing.

    The mean over no item is NaN, and NaN it stays however little it weighs.
    """
    part = loss * share(own, whole, ranks)
    return torch.where(own > 0, part, 0.0) if isinstance(own, torch.Tensor) else part


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss predicts the next label: a causal language model's does."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    kind = getattr(model, "loss_type", None)
    if kind is not None or not hasattr(type(model), "loss_function"):
        return kind in _SHIFTING
    # A name that tells nothing (GPT2LMHeadModel): the loss that is asked for then is a causal one.
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def smoothed(
    logits: torch.Tensor, labels: torch.Tensor, epsilon: float, *, shifted: bool = False
) -> torch.Tensor:
    """Return the cross entropy against labels softened by `epsilon`, over the counted items."""
    if shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    log_odds = functional.log_softmax(logits.float(), dim=-1)
    counted = (labels != IGNORED).to(log_odds.dtype)
    wanted = labels.clamp(min=0).unsqueeze(-1)
    right = -log_odds.gather(-1, wanted).squeeze(-1) * counted
    spread = -log_odds.sum(dim=-1) * counted
    num, classes = counted.sum().clamp(min=1), log_odds.shape[-1]
    return (1 - epsilon) * (right.sum() / num) + epsilon * (spread.sum() / (num * classes))


def reads(function: Callable[..., Any], name: str) -> bool:
    """Whether a function's body reads its parameter of that name, or passes on all it gets.

    >>> def by_items(outputs, labels, num_items_in_batch=None): return outputs / num_items_in_batch
    >>> def by_mean(outputs, labels, num_items_in_batch=None): return outputs.mean()
    >>> def by_mean_too(outputs, labels, **others): return outputs.mean()
    >>> [reads(each, "num_items_in_batch") for each in (by_items, by_mean, by_mean_too)]
    [True, False, False]
    """
    while isinstance(function, partial):
        if name in function.keywords:
            return True
        function = function.func
    code = _code(function)
    if code is None:
        return True  # compiled: nobody can look into it
    num_named = code.co_argcount + code.co_kwonlyargcount
    if name in code.co_varnames[:num_named]:
        return _loads(code, name)
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    has_args = bool(code.co_flags & inspect.CO_VARARGS)
    return _loads(code, code.co_varnames[num_named + has_args])


def _code(function: Callable[..., Any]) -> CodeType | None:
    """Return the code of what a function, a method, a decorated one or an object runs."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    found = getattr(type(function).__call__, "__code__", None) if code is None else code
    return found if isinstance(found, CodeType) else None


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be given an argument of that name.

    >>> takes(lambda model, inputs: 0, "num_items_in_batch")
    False
    """
    function = getattr(function, "__func__", function)
    try:
        return _takes(function, name)
    except TypeError:  # an object that cannot be a key
        return _takes.__wrapped__(function, name)


@lru_cache(maxsize=64)  # asked at every step, and a signature takes 20 us to read
def _takes(function: Callable[..., Any], name: str) -> bool:
    code = _code(function)
    if code is None:
        return True  # compiled: nobody can look into it
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return name in names or bool(code.co_flags & inspect.CO_VARKEYWORDS)


@lru_cache(maxsize=64)
def _loads(code: CodeType, name: str) -> bool:
    return any(
        name in _names(step.argval)
        for _, step in bytecode.steps(code)
        if step.opname.startswith("LOAD_")
    )


def _names(argument: Any) -> tuple[Any, ...]:
    return argument if isinstance(argument, tuple) else (argument,)
