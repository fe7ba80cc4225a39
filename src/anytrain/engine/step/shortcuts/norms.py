"""Layer norms for bfloat16 training, and the sums that they are of.

Autocast computes them in float32. Here the result comes in both precisions at once, as the layers
behind it read it rounded; and what was only promised, a layer's result added to what went around
the layer, is computed on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anytrain.engine.step.shortcuts.later import Result, can_be_read, promised_sum, real
from anytrain.engine.step.shortcuts.layers import are_plain, with_sums
from anytrain.engine.step.shortcuts.refusals import lead_around, once
from anytrain.machine.backends.cuda_kernels import (
    NORM_PART,
    Kernels,
    Sent,
    norm_backward,
    norm_forward,
)

_MOST_PARTS = 8
_DENSE: Any = {"memory_format": torch.contiguous_format}


def is_norm(module: Any, kernels: Kernels) -> bool:
    """Whether it is a layer norm that the kernels know."""
    return (
        type(module).forward is nn.LayerNorm.forward
        and "forward" not in vars(module)
        and len(module.normalized_shape) == 1
        and kernels.knows_norm(module.normalized_shape[0])
        and module.weight is not None
        and module.bias is not None
        and are_plain([module.weight, module.bias])
    )


def norm_widths(model: nn.Module) -> list[int]:
    """Return the widths of the model's layer norms that have a kernel, in parts of 128."""
    found = [
        module.normalized_shape[0] // NORM_PART
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        and len(module.normalized_shape) == 1
        and module.normalized_shape[0] % NORM_PART == 0
    ]
    return [parts for parts in found if parts <= _MOST_PARTS]


class _LayerNorm(torch.autograd.Function):
    """A layer norm in float32 that gives its result rounded, too."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any, eps: float, kernels: Kernels) -> Any:
        made = norm_forward(kernels, inputs, weight, bias, eps)
        ctx.save_for_backward(inputs, weight, made.means, made.scales)
        ctx.kernels = kernels
        ctx.set_materialize_grads(False)
        return made.result, made.rounded

    @staticmethod
    @once
    def backward(ctx: Any, *given: Any) -> Any:
        sent = Sent(*map(_readable, given))
        if sent.whole is None and sent.rounded is None:
            return (None,) * 5
        made = norm_backward(ctx.kernels, ctx.saved_tensors, sent)
        return made.inputs, made.weight, made.bias, None, None


class _SumNorm(torch.autograd.Function):
    """A layer norm of a sum that nobody has computed yet; gives the sum, too.

    `half` is a layer's result and `added` the same after a dropout, where there was one.
    """

    @staticmethod
    def forward(
        ctx: Any, half: Any, whole: Any, weight: Any, bias: Any, added: Any, how: Any
    ) -> Any:
        dropped, eps, kernels = how
        made = norm_forward(kernels, whole, weight, bias, eps, added)
        kept = () if dropped is None else (dropped.mask,)
        ctx.save_for_backward(made.inputs, weight, made.means, made.scales, *kept)
        ctx.kernels, ctx.factor = kernels, 1.0 if dropped is None else dropped.scale
        ctx.set_materialize_grads(False)
        return made.result, made.rounded, made.inputs

    @staticmethod
    @once
    def backward(ctx: Any, *given: Any) -> Any:
        sent = Sent(*map(_readable, given))
        if all(gradient is None for gradient in sent):
            return (None,) * 6
        inputs, weight, means, scales, *kept = ctx.saved_tensors
        made = norm_backward(
            ctx.kernels,
            (inputs, weight, means, scales),
            sent,
            has_addend=True,
            mask=kept[0] if kept else None,
            factor=ctx.factor,
        )
        of_half = with_sums(made.addend, made.addend_sums)
        is_read = sent.whole is not None or sent.rounded is not None
        of_own = (made.weight, made.bias) if is_read else (None, None)  # no gradient is not zero
        return of_half, made.inputs, *of_own, None, None


def _readable(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient that kernels can read."""
    return gradient if gradient is None or can_be_read(gradient) else gradient.clone(**_DENSE)


def normalize(
    inputs: torch.Tensor, norm: Any, kernels: Kernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer norm's result, and the same rounded.

    An input that was only promised is computed on the way.
    """
    promise = promised_sum(inputs)
    if promise is None:
        result, rounded = _layer_norm(real(inputs), norm.weight, norm.bias, norm.eps, kernels)
        lead_around(result)
        return result, rounded
    added, whole = promise.parts
    assert isinstance(added, Result)
    dropped = added.dropped if added.dropped and added.dropped.is_all(added) else None
    half = added if dropped is None else dropped.inputs
    how = dropped, norm.eps, kernels
    result, rounded, made = _sum_norm(half, whole, norm.weight, norm.bias, added.detach(), how)
    promise.settle(made)
    lead_around(made)
    lead_around(result)
    return result, rounded


_layer_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _LayerNorm.apply
_sum_norm: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _SumNorm.apply
