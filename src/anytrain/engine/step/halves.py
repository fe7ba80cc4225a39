"""Weights rounded to bfloat16 once a step, and layers that use them.

Autocast rounds each weight by itself, turns each weight's gradient back to float32, and rounds a
layer's input anew for each layer that reads it. The values are the same here; the launches are
fewer, and gradients stay in the bfloat16 that they were computed in. A layer norm, which autocast
computes in float32, gives its result in both precisions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytrain.machine.backends.cuda_kernels import (
    NORM_PART,
    ROW,
    Kernels,
    chunks_of,
    column_sums,
    norm_backward,
    norm_forward,
    scratch_for,
)

_HALF = torch.bfloat16
_ALIGNED = 16
_MOST_PARTS = 8


class Halves:
    """The working copies of a model's linear layers."""

    def __init__(self, kernels: Kernels, model: nn.Module) -> None:
        self._kernels = kernels
        self._layers: list[Any] = [m for m in model.modules() if _is_linear(m)]
        held: dict[nn.Parameter, None] = dict.fromkeys(
            parameter
            for layer in self._layers
            for parameter in (layer.weight, layer.bias)
            if parameter is not None
        )
        self._made_for = _places(held)
        self.of: dict[torch.Tensor, torch.Tensor] = {
            parameter: torch.zeros_like(parameter, dtype=_HALF, requires_grad=False).requires_grad_(
                parameter.requires_grad
            )
            for parameter in held
        }
        device = next(iter(held)).device
        counts = [parameter.numel() for parameter in held]
        self._chunks = chunks_of(counts, device)
        rows = torch.zeros(len(counts), ROW, dtype=torch.int64)
        for row, (parameter, half) in zip(rows, self.of.items(), strict=True):
            row[0], row[1], row[5] = parameter.data_ptr(), half.data_ptr(), parameter.numel()
        self._rows = rows.to(device)
        self._scratch = scratch_for(max(_width(layer) for layer in self._layers), device)
        self._norms: list[Any] = [m for m in model.modules() if _is_norm(m, kernels)]
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self._normed: tuple[torch.Tensor, torch.Tensor] | None = None

    def is_stale(self) -> bool:
        """Whether a parameter has moved, or was frozen or freed, since the copies were made."""
        return _places(self.of) != self._made_for

    @contextmanager
    def used(self) -> Iterator[None]:
        """Round all weights, and let the model's linear layers use them inside the block."""
        self._kernels.launch("halve", (len(self._chunks), 1), [self._rows, self._chunks])
        for layer in self._layers:
            vars(layer)["forward"] = self._linear(layer)
        for norm in self._norms:
            vars(norm)["forward"] = self._norm(norm)
        try:
            yield
        finally:
            self._last = self._normed = None
            for layer in (*self._layers, *self._norms):
                del vars(layer)["forward"]

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's gradient, wherever the backward pass has left it."""
        half = self.of.get(parameter)
        found = None if half is None else half.grad
        if found is None:
            return parameter.grad
        if parameter.grad is not None:  # the layer ran in both precisions
            return parameter.grad.add_(found)
        return found

    def clear(self) -> None:
        """Let go of the gradients."""
        for half in self.of.values():
            half.grad = None

    def _norm(self, norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        plain = type(norm).forward

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            fits = inputs.dtype == torch.float32 and inputs.is_contiguous()
            if not (fits and torch.is_autocast_enabled("cuda")):
                result = plain(norm, inputs)
            else:
                self._normed = result, _ = _normalize(
                    inputs, norm.weight, norm.bias, norm.eps, self._kernels
                )
            return result  # type: ignore[no-any-return]  # a tensor, in either case

        return forward

    def _linear(self, layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        plain = type(layer).forward
        weight = self.of[layer.weight]
        bias = None if layer.bias is None else self.of[layer.bias]
        is_turned = _is_turned(layer)

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled("cuda"):
                result = _apply(self._rounded(inputs), weight, bias, self, is_turned)
            else:  # the model wants full precision here
                result = plain(layer, inputs)
            return result  # type: ignore[no-any-return]  # a tensor, in either case

        return forward

    def _rounded(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the input in bfloat16; layers that read the same one share it."""
        if inputs.dtype == _HALF:
            return inputs
        if self._normed is not None and self._normed[0] is inputs:
            return self._normed[1]
        if self._last is None or self._last[0] is not inputs:
            self._last = inputs, inputs.to(_HALF)
        return self._last[1]

    def sum_rows(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the sum of a matrix's rows: a bias's gradient."""
        if matrix.shape[1] % 8 or matrix.data_ptr() % _ALIGNED:
            return matrix.sum(0)
        return column_sums(self._kernels, matrix, self._scratch)


def fits(model: nn.Module) -> bool:
    """Whether the model has linear layers to work on."""
    return any(_is_linear(module) for module in model.modules())


def _is_turned(layer: nn.Module) -> bool:
    """Whether it keeps its weight the other way round, as transformers' Conv1D does."""
    return not isinstance(layer, nn.Linear)


def _is_linear(module: nn.Module) -> bool:
    kind = type(module)
    known = kind.forward is nn.Linear.forward or (
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    )
    if not known or "forward" in vars(module):
        return False
    held: list[Any] = [module.weight, module.bias]
    return _are_plain([parameter for parameter in held if parameter is not None])


def _is_norm(module: Any, kernels: Kernels) -> bool:
    return (
        type(module).forward is nn.LayerNorm.forward
        and "forward" not in vars(module)
        and len(module.normalized_shape) == 1
        and kernels.knows_norm(module.normalized_shape[0])
        and module.weight is not None
        and module.bias is not None
        and _are_plain([module.weight, module.bias])
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


def _are_plain(parameters: list[Any]) -> bool:
    return all(
        isinstance(p, nn.Parameter)
        and p.dtype == torch.float32
        and p.is_cuda
        and p.is_contiguous()
        and p.data_ptr() % _ALIGNED == 0
        for p in parameters
    )


def _places(parameters: Iterable[torch.Tensor]) -> list[tuple[int, bool]]:
    return [(parameter.data_ptr(), parameter.requires_grad) for parameter in parameters]


def _width(layer: Any) -> int:
    return int(layer.weight.shape[1 if _is_turned(layer) else 0])


class _Linear(torch.autograd.Function):
    """A linear layer in bfloat16 whose bias gradient is one launch."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any, halves: Halves, turned: bool) -> Any:
        ctx.save_for_backward(inputs, weight)
        ctx.halves, ctx.turned = halves, turned
        return functional.linear(inputs, weight.t() if turned else weight, bias)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        gradient = given[0].reshape(-1, given[0].shape[-1]).contiguous()
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_inputs = of_weight = of_bias = None
        if needs_inputs:
            of_inputs = gradient @ (weight.t() if ctx.turned else weight)
            of_inputs = of_inputs.view(inputs.shape)
        if needs_weight:
            rows = inputs.reshape(-1, inputs.shape[-1])
            of_weight = rows.t() @ gradient if ctx.turned else gradient.t() @ rows
        if needs_bias:
            of_bias = ctx.halves.sum_rows(gradient)
        return of_inputs, of_weight, of_bias, None, None


class _LayerNorm(torch.autograd.Function):
    """A layer norm in float32 that gives its result rounded, too."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any, eps: float, kernels: Kernels) -> Any:
        result, rounded, means, scales = norm_forward(kernels, inputs, weight, bias, eps)
        ctx.save_for_backward(inputs, weight, means, scales)
        ctx.kernels = kernels
        ctx.set_materialize_grads(False)
        return result, rounded

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        whole, rounded = (None if g is None else g.contiguous() for g in given)
        gradients = norm_backward(ctx.kernels, ctx.saved_tensors, whole, rounded)
        return *gradients, None, None


_apply: Callable[..., Any] = _Linear.apply
_normalize: Callable[..., Any] = _LayerNorm.apply
