"""Tell which of a model's modules compute a GELU, however their forward is written, and compute it.

Written out in Python it is a dozen kernels, most of them in float32 under autocast; torch's own is
one each way. Behind a linear layer, our way back gives that layer's bias its gradient, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from anytrain.fast.kernels.step import gelu_backward
from anytrain.fast.shortcuts.layers import Tools, can_sum, with_sums
from anytrain.fast.shortcuts.lazy_tensor import Result
from anytrain.fast.shortcuts.refusals import once
from anytrain.fast.shortcuts.trials import are_near, at, is_plain, tried

Form = Callable[[torch.Tensor], torch.Tensor]
BY_TANH: Form = partial(functional.gelu, approximate="tanh")
FORMS: tuple[Form, ...] = (BY_TANH, functional.gelu)
_FAR = (20.0, 100.0, 1e4)
"""Where a GELU that is clipped shows itself."""


def form_of(module: Any) -> Form | None:
    """Return the form of torch's GELU that a module computes; None where it is something else."""
    if "gelu" not in type(module).__name__.lower() or not is_plain(module):
        return None
    found = tried(module, grid())
    return next((form for form in FORMS if are_near(found, at(form, grid()))), None)


def grid() -> torch.Tensor:
    """Return the numbers that an activation is tried on."""
    near = torch.linspace(-12.0, 12.0, 961, dtype=torch.float32, device="cpu")
    far = torch.tensor(_FAR, dtype=torch.float32, device="cpu")
    return torch.cat([near, far, -far])


class _Gelu(torch.autograd.Function):
    """A GELU of a linear layer's result, whose way back gives that layer's bias its gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, form: Any, tools: Tools) -> Any:
        ctx.save_for_backward(inputs.detach())
        ctx.how = tools, form is BY_TANH
        ctx.set_materialize_grads(False)
        return form(inputs)

    @staticmethod
    @once
    def backward(ctx: Any, *given: Any) -> Any:
        if given[0] is None:
            return None, None, None
        (inputs,), (tools, by_tanh) = ctx.saved_tensors, ctx.how
        read, sent = (t.reshape(-1, t.shape[-1]) for t in (inputs, given[0]))
        if not can_sum(sent):
            sent = sent.clone(memory_format=torch.contiguous_format)
        made, sums = gelu_backward(tools.kernels, read, sent, tools.scratch, by_tanh=by_tanh)
        return with_sums(made.view(inputs.shape), sums), None, None


def gelu(inputs: torch.Tensor, form: Form, tools: Tools) -> torch.Tensor:
    """Return a bfloat16 tensor's GELU of this form."""
    if isinstance(inputs, Result) and torch.is_grad_enabled() and can_sum(inputs):
        return _gelu(inputs, form, tools)
    return form(inputs)


_gelu: Callable[..., torch.Tensor] = _Gelu.apply
