"""The gated middle of Llama's like: down(SiLU(gate(x)) * up(x)), whose product is one kernel.

Gate and up read the same input and are one multiplication, so their results lie in rows of one
tensor, which torch's element by element kernels are slow on; and the two gradients come out as the
one tensor that the multiplication's way back wants. (To autograd the product is a view: where
somebody writes to it, the step is recorded without shortcuts.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytrain.engine.step.activations import has_hooks
from anytrain.fast.kernels.elementwise import can_gate, gate, gate_backward
from anytrain.fast.kernels.step import Kernels
from anytrain.fast.shortcuts.gelu import grid
from anytrain.fast.shortcuts.refusals import once
from anytrain.fast.shortcuts.trials import (
    are_near,
    at,
    attempted,
    is_plain,
    run_twin,
    tried,
)

_PARTS = ("gate_proj", "up_proj", "act_fn", "down_proj")
_WIDTH = 64
_TRIALS = (
    ((3,), torch.float32, 1e-5),
    ((2, 3), torch.float32, 1e-5),
    ((3, 1, 2), torch.float32, 1e-5),
    ((2, 3), torch.bfloat16, 2e-2),
)
"""The inputs' shapes, what their layers give, and how near the product must be."""


def is_gated(module: nn.Module) -> bool:
    """Whether a module's forward is that, however it is written."""
    parts = dict(module.named_children())
    if set(parts) != set(_PARTS) or "forward" in vars(module):
        return False
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not own and _is_silu(parts["act_fn"]) and bool(attempted(lambda: _is_product(module)))


def _is_silu(module: nn.Module) -> bool:
    is_one = "silu" in type(module).__name__.lower() and is_plain(module)
    return is_one and are_near(tried(module, grid()), at(functional.silu, grid()))


class _Stands(nn.Module):
    """Stands for a layer: keeps what it was given, and returns what it was told to."""

    def __init__(self, told: torch.Tensor | None = None) -> None:
        super().__init__()
        self.told = told
        self.given: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.given.append(inputs)
        return inputs if self.told is None else self.told


def _is_product(module: nn.Module) -> bool:
    """Whether a copy whose layers are stand-ins makes the product, and passes the rest on.

    In each number of dimensions, and of rounded values rounded.
    """
    how: Any = {"generator": torch.Generator("cpu").manual_seed(0), "dtype": torch.float32}
    for shape, dtype, near in _TRIALS:
        inputs, *given = (torch.randn(*shape, _WIDTH, device="cpu", **how) for _ in range(3))
        opens, values = (tensor.to(dtype) for tensor in given)
        found = at(partial(_stood_in, module, inputs), opens, values)
        if not are_near(found, at(lambda o, v: functional.silu(o) * v, opens, values), near):
            return False
    return True


def _stood_in(
    module: nn.Module, inputs: torch.Tensor, opens: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return what the module gives its last layer, if that is all there is to it."""
    gate_layer, up_layer, last = _Stands(opens), _Stands(values), _Stands()
    layers = gate_layer, up_layer, nn.SiLU(), last
    result = run_twin(module, inputs, _modules=dict(zip(_PARTS, layers, strict=True)))
    read = [*gate_layer.given, *up_layer.given]
    if len(read) != 2 or any(each is not inputs for each in read):
        raise ValueError("its layers read something else")
    if len(last.given) != 1 or result is not last.given[0]:
        raise ValueError("something comes behind the last layer")
    return result


def gated(module: Any, inputs: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return what a gated module makes of an input."""
    opens, values = module.gate_proj(inputs), module.up_proj(inputs)
    is_even = opens.shape == values.shape and not has_hooks(module.act_fn)
    if is_even and _can(opens) and _can(values):
        product = _product(opens, values, kernels)
    else:
        product = module.act_fn(opens) * values
    result: torch.Tensor = module.down_proj(product)
    return result


def _can(tensor: torch.Tensor) -> bool:
    is_rounded = tensor.dtype == torch.bfloat16 and tensor.dim() > 1
    return is_rounded and can_gate(_matrix(tensor))


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's rows one below the other, where they lie."""
    return tensor.flatten(0, -2)


class _Product(torch.autograd.Function):
    """The SiLU of one tensor times another."""

    @staticmethod
    def forward(ctx: Any, opens: Any, values: Any, kernels: Kernels) -> Any:
        ctx.save_for_backward(opens.detach(), values.detach())
        ctx.kernels = kernels
        ctx.set_materialize_grads(False)
        return gate(kernels, _matrix(opens), _matrix(values)).view(opens.shape)

    @staticmethod
    @once
    def backward(ctx: Any, *given: Any) -> Any:
        if given[0] is None:
            return None, None, None
        opens, values = ctx.saved_tensors
        sent = _matrix(given[0].contiguous())
        made = gate_backward(ctx.kernels, _matrix(opens), _matrix(values), sent)
        return *(each.view(opens.shape) for each in made), None


_product: Callable[..., torch.Tensor] = _Product.apply
