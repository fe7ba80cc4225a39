"""Layer norms and RMS norms for bfloat16 training, and the sums that they are of.

Autocast computes them in float32. Here the result comes in both precisions at once, as the layers
behind it read it rounded; and what was only promised, a layer's result added to what went around
the layer, is computed on the way. An RMS norm, which models write out in Python, is one kernel each
way in place of twenty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from anytrain.fast.kernels.step import (
    Kernels,
    Norm,
    Sent,
    norm_backward,
    norm_forward,
)
from anytrain.fast.shortcuts.layers import are_plain, with_sums
from anytrain.fast.shortcuts.lazy_tensor import Result, can_be_read, promised_sum, real
from anytrain.fast.shortcuts.refusals import lead_around, once
from anytrain.fast.shortcuts.trials import are_near, at, is_plain, tried

_DENSE: Any = {"memory_format": torch.contiguous_format}
_EPSILONS = ("variance_epsilon", "eps")
"""What an RMS norm may call it."""
_SIZES = (1e-3, 0.05, 1.0, 300.0, 2.0, 0.5)
"""Of the rows that an RMS norm is tried on: in the smallest, its epsilon tells."""
_SHAPES = ((6,), (2, 3), (3, 1, 2))
"""In which it gets them: some norm over more than a row where there are more dimensions."""


class Known(NamedTuple):
    """A module that is a norm which kernels may know."""

    module: Any
    kind: Norm
    epsilon: float

    @property
    def bias(self) -> Any:
        """The module's bias, if its kind has one."""
        return self.module.bias if self.kind.is_centered else None


def norms_of(model: nn.Module) -> list[Known]:
    """Return the model's norms, of whatever width."""
    found = (_layer(module) or _rms(module) for module in model.modules())
    return [norm for norm in found if norm is not None]


def norm_kinds(model: nn.Module) -> list[Norm]:
    """Return the kinds of norms to compile kernels for."""
    return [norm.kind for norm in norms_of(model)]


def known_norms(model: nn.Module, kernels: Kernels) -> Iterator[Known]:
    """Yield the model's norms that the kernels can compute."""
    for norm in norms_of(model):
        own = [norm.module.weight, *([] if norm.bias is None else [norm.bias])]
        if kernels.knows_norm(norm.kind) and are_plain(own):
            yield norm


def _layer(module: Any) -> Known | None:
    """Return a layer norm as such; None where it is none."""
    if type(module).forward is not nn.LayerNorm.forward or "forward" in vars(module):
        return None
    if len(module.normalized_shape) != 1 or module.weight is None or module.bias is None:
        return None
    return Known(module, Norm(module.normalized_shape[0]), module.eps)


def _rms(module: Any) -> Known | None:
    """Return an RMS norm as such, however its forward is written; None where it is none."""
    if "norm" not in type(module).__name__.lower() or not is_plain(module, "weight"):
        return None
    given = [getattr(module, name) for name in _EPSILONS if hasattr(module, name)]
    epsilon = torch.finfo(torch.float32).eps if given == [None] else next(iter(given), None)
    if module.weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    width = len(module.weight)
    how: Any = {"generator": torch.Generator("cpu").manual_seed(0), "dtype": torch.float32}
    weight = torch.randn(width, device="cpu", **how)
    for shape in _SHAPES:
        sizes = torch.tensor(_SIZES, dtype=torch.float32, device="cpu").view(*shape, 1)
        rows = sizes * torch.randn(*shape, width, device="cpu", **how)
        expected = at(lambda x, w: functional.rms_norm(x, (width,), w, epsilon), rows, weight)
        if not are_near(tried(module, rows, weight=weight), expected):
            return None
    return Known(module, Norm(width, is_centered=False), epsilon)


class _Norm(torch.autograd.Function):
    """A norm in float32 that gives its result rounded, too."""

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
    """A norm of a sum that nobody has computed yet; gives the sum, too.

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
    inputs: torch.Tensor, norm: Known, kernels: Kernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a norm's result, and the same rounded.

    An input that was only promised is computed on the way.
    """
    promise = promised_sum(inputs)
    own = norm.module.weight, norm.bias
    if promise is None:
        result, rounded = _norm(real(inputs), *own, norm.epsilon, kernels)
        lead_around(result)
        return result, rounded
    added, whole = promise.parts
    assert isinstance(added, Result)
    dropped = added.dropped if added.dropped and added.dropped.is_all(added) else None
    half = added if dropped is None else dropped.inputs
    how = dropped, norm.epsilon, kernels
    result, rounded, made = _sum_norm(half, whole, *own, added.detach(), how)
    promise.settle(made)
    lead_around(made)
    lead_around(result)
    return result, rounded


_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _Norm.apply
_sum_norm: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _SumNorm.apply
