"""What a step with shortcuts cannot give, refused where it is asked for.

Shortcuts lead gradients around tensors that the model's code can see: layers read what was rounded
beside a layer norm's result, and weights that were rounded at the beginning of the step. So whoever
puts a hook on such a tensor, or asks for a gradient with respect to a tensor or for one of a
gradient, gets a `BrokenPromise`, and the step is recorded without them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from anytrain.core import patches

_around: WeakIdKeyDictionary = WeakTensorKeyDictionary()
"""Tensors that a part of the gradients goes around: a hook on one would see the rest alone."""
_HOOKS = ("register_hook", "retain_grad")


class BrokenPromise(Exception):
    """Something that a shortcut cannot give."""


def lead_around(tensor: torch.Tensor) -> None:
    """Note that not all gradients come through this tensor: hooks on it are refused."""
    _around[tensor] = True


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a way back that cannot be differentiated, and says so.

    torch says it only where what comes in has a gradient itself.
    """
    inner = once_differentiable(backward)

    @wraps(backward)
    def called(ctx: Any, *given: Any) -> Any:
        if torch.is_grad_enabled():
            raise BrokenPromise("a gradient of a gradient is asked for")
        return inner(ctx, *given)

    return called


@contextmanager
def refusals() -> Iterator[None]:
    """Refuse in the block what shortcuts cannot give; other threads may ask for what they like.

    The backward pass is no other's: on a GPU it runs in a thread of torch's, and functions in it
    that are the user's own may ask for gradients of weights.
    """
    autograd: Any = torch.autograd
    engine, thread = autograd._engine_run_backward, threading.get_ident()

    def run(
        tensors: Any, grads: Any, keep: Any, create: Any, inputs: Any, *a: Any, **k: Any
    ) -> Any:
        is_steps = threading.get_ident() == thread or torch._C._current_graph_task_id() != -1
        if (create or inputs) and is_steps:
            raise BrokenPromise("the step asks for gradients itself (torch.autograd.grad)")
        return engine(tensors, grads, keep, create, inputs, *a, **k)

    hooks = {name: _refusing(getattr(torch.Tensor, name)) for name in _HOOKS}
    try:
        with (
            patches.replaced("gradient hooks", torch.Tensor, **hooks),
            patches.replaced("gradient hooks", autograd, _engine_run_backward=run),
        ):
            yield
    finally:
        _around.clear()


def _refusing(own: Any) -> Any:
    """Return a method that puts hooks on tensors, but not on those that gradients go around."""

    @wraps(own)
    def called(tensor: torch.Tensor, *given: Any, **more: Any) -> Any:
        if tensor in _around:
            raise BrokenPromise(
                f"{own.__name__} asks for the gradient of a layer norm's result or sum"
            )
        return own(tensor, *given, **more)

    called.instead_of = own  # type: ignore[attr-defined]
    return called
