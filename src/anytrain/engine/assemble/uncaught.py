"""Add to an error that nobody caught what is known of its cause: the device's, or the batch's."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytrain.core.errors import AnytrainError
from anytrain.engine.assemble import current
from anytrain.engine.assemble.inputs import Fed, explain, is_lost, out_of_range
from anytrain.engine.step import ranges
from anytrain.engine.tree import map_tensors
from anytrain.machine.backends.base import Backend

_explained: set[str] = set()
_TOLD = "\n  batch: "
_OF_INPUTS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)

Call = tuple[nn.Module, Callable[[nn.Module, Any], Any], Mapping[str, Any]]
"""A module, how it was called with a batch, and the batch by the names of its arguments."""


def explain_uncaught(backend: Backend) -> None:
    """From now on, say below an uncaught error's traceback what is known of its cause."""
    if backend.name in _explained:
        return
    _explained.add(backend.name)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = backend.explain(error)
        if words:
            error.add_note(words)
        with suppress(Exception):  # the error is what must be shown, whatever is known of it
            explain_inputs(error, trace)
        previous(kind, error, trace)

    sys.excepthook = hook


def explain_inputs(
    error: BaseException, trace: TracebackType | None, *, has_values: bool = True
) -> None:
    """Say which input of a loop of the user's own an error came of; a Trainer tells of its own.

    Without values, as on a claimed device, what the tensors hold is not looked at.
    """
    session = current.get()
    if session is None or session.cursor.left is None or not isinstance(error, _OF_INPUTS):
        return
    call = _outermost_call(trace)
    is_told = isinstance(error, AnytrainError) or _TOLD in str(error)
    if call is None or is_told or is_lost(error):
        return
    model, run, batch = call
    number, samples = session.cursor.left
    host = map_tensors(torch.Tensor.cpu, batch)
    fed = Fed(host, samples, session.cursor.updates + 1, number)
    outside = None
    if has_values and isinstance(error, (IndexError, RuntimeError)):
        outside = ranges.find(model, fed.batch, run, ranges.tables(model))
    told = explain(error, fed, model) if outside is None else out_of_range(fed, outside)
    if told is not None:
        error.add_note(f"anytrain: {told}")


def _outermost_call(trace: TracebackType | None) -> Call | None:
    """Return the first call of a module, or of a loss function, that the error passed through."""
    while trace is not None:
        frame = trace.tb_frame
        called: Any = frame.f_locals.get("self")
        if frame.f_code is nn.Module._call_impl.__code__ and not _wraps(called):
            return _of_module(called, frame)
        if frame.f_code is functional.cross_entropy.__code__:
            return _of_loss(frame)
        trace = trace.tb_next
    return None


def _wraps(module: Any) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "_orig_mod")


def _of_module(module: nn.Module, frame: FrameType) -> Call | None:
    bound = inspect.signature(module.forward)
    try:
        given = bound.bind_partial(*frame.f_locals["args"], **frame.f_locals["kwargs"])
    except TypeError:  # it is what the error says: the call does not fit
        return module, lambda model, batch: None, dict(frame.f_locals["kwargs"])
    named = {
        name: value for each, value in given.arguments.items() for name, value in _flat(each, value)
    }

    return module, lambda model, batch: model(**batch), named


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return what a `**kwargs` took, one by one."""
    return list(value.items()) if name == "kwargs" and isinstance(value, dict) else [(name, value)]


def _of_loss(frame: FrameType) -> Call:
    held = frame.f_locals
    loss = nn.CrossEntropyLoss(ignore_index=held["ignore_index"])
    batch = {"input": held["input"], "labels": held["target"]}
    return loss, lambda model, given: model(given["input"], given["labels"]), batch
