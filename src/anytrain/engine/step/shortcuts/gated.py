"""The gated middle of Llama's like: down(SiLU(gate(x)) * up(x)), whose product is one kernel.

Gate and up read the same input and are one multiplication, so their results lie in rows of one
tensor, which torch's element by element kernels are slow on; and the two gradients come out as the
one tensor that the multiplication's way back wants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytrain.engine.step.blocks import has_hooks
from anytrain.engine.step.shortcuts.gelu import grid
from anytrain.engine.step.shortcuts.refusals import once
from anytrain.engine.step.shortcuts.trials import are_near, at, attempted, is_plain, tried
from anytrain.machine.backends.cuda_elementwise import can_gate, gate, gate_backward
from anytrain.machine.backends.cuda_kernels import Kernels

_PARTS = ("gate_proj", "up_proj", "act_fn", "down_proj")
_WIDTH = 64


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
        self.told, self.given = told, []  # type: ignore[var-annotated]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.given.append(inputs)
        return inputs if self.told is None else self.told


def _is_product(module: nn.Module) -> bool:
    """Whether a copy whose layers are stand-ins makes the product, and passes the rest on."""
    dice = torch.Generator("cpu").manual_seed(0)
    how: Any = {"generator": dice, "dtype": torch.float32, "device": "cpu"}
    inputs, opens, values = (torch.randn(2, _WIDTH, **how) for _ in range(3))
    seen: list[list[torch.Tensor]] = []

    def forward(opens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        twin = nn.Module.__new__(type(module))
        layers = _Stands(opens), _Stands(values), nn.SiLU(), _Stands()
        vars(twin).update(vars(module), _modules=dict(zip(_PARTS, layers, strict=True)))
        seen.extend(layer.given for layer in layers if isinstance(layer, _Stands))
        result: torch.Tensor = type(module).forward(twin, inputs)
        if result is not seen[-1][-1]:
            raise ValueError("something comes behind the last layer")
        return result

    found = at(forward, opens, values)
    is_read = all(len(given) == 1 for given in seen) and all(x[0] is inputs for x in seen[:2])
    return is_read and are_near(found, at(lambda o, v: functional.silu(o) * v, opens, values))


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
