"""Tell what a module computes by trying a copy of it on a few numbers.

Models write the same function in many ways; values and gradients are what they have in common. A
module that keeps something of what it does is more than the function, and is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from anytrain.engine.step.activations import has_hooks

Found = tuple[torch.Tensor, ...]
"""A function's values, and the gradients of what it was given."""
_NEAR = 1e-5
_CONTAINERS = (list, dict, set)


def is_plain(module: nn.Module, *parameters: str) -> bool:
    """Whether its forward is all there is to it, besides parameters of these names."""
    held = [name for name, _ in module.named_parameters()]
    more = [*module.buffers(), *module.children()]
    is_own = held == list(parameters) and not more
    return is_own and "forward" not in vars(module) and not has_hooks(module)


def at(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> Found:
    """Return what a function makes of numbers, and their gradients."""
    with torch.enable_grad():
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        values = function(*leaves)
        # By weights of their own: of a plain sum, a norm's gradients are nearly nothing.
        sent = torch.linspace(0.5, 1.5, values.numel(), dtype=values.dtype, device=values.device)
        found = torch.autograd.grad(values, leaves, sent.view(values.shape))
    return values.detach(), *found


def tried(module: nn.Module, inputs: torch.Tensor, **parameters: torch.Tensor) -> Found | None:
    """Return what a copy of the module makes of an input, with these parameters.

    None where it cannot be told.
    """

    def forward(inputs: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        return run_twin(module, inputs, _parameters=dict(zip(parameters, own, strict=True)))

    found: Found | None = attempted(partial(at, forward, inputs, *parameters.values()))
    return found


def run_twin(module: nn.Module, inputs: torch.Tensor, **instead: Any) -> torch.Tensor:
    """Return what a module's forward makes of an input, with other attributes of these names.

    A ValueError says that it keeps something. Lists and the like are copies, so that nothing is
    seen of it in the run.
    """
    twin = object.__new__(type(module))
    held = {n: copy(v) if isinstance(v, _CONTAINERS) else v for n, v in vars(module).items()}
    vars(twin).update({**held, **instead})
    before = _marks(twin)
    result: torch.Tensor = type(module).forward(twin, inputs)
    if _marks(twin) != before:
        raise ValueError("it keeps something")
    return result


def _marks(module: Any) -> dict[str, tuple[int, ...]]:
    """Return what tells whether an attribute is another one, or has got other contents."""
    return {name: (id(value), *_inside(value)) for name, value in vars(module).items()}


def _inside(value: Any) -> tuple[int, ...]:
    if isinstance(value, dict):
        return tuple(id(each) for pair in value.items() for each in pair)
    return tuple(map(id, value)) if isinstance(value, (list, set)) else ()


def attempted(trial: Callable[[], Any]) -> Any:
    """Return what a trial finds; None where it fails, as it wants more than what is looked for."""
    try:
        with torch.random.fork_rng(devices=[]):
            return trial()
    except Exception:  # noqa: BLE001  whatever it wants
        return None


def are_near(found: Found | None, expected: Found, near: float = _NEAR) -> bool:
    """Whether values and gradients are the same, up to rounding."""
    return found is not None and all(
        (one.shape, one.dtype) == (other.shape, other.dtype)
        and torch.allclose(one, other, rtol=near, atol=near)
        for one, other in zip(found, expected, strict=True)
    )
