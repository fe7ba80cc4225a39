"""Tell which of a model's modules compute a GELU, however their forward is written.

Written out in Python it is a dozen kernels, most of them in float32 under autocast; torch's own is
one each way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytrain.engine.step.blocks import has_hooks

Form = Callable[[torch.Tensor], torch.Tensor]
FORMS: tuple[Form, ...] = (partial(functional.gelu, approximate="tanh"), functional.gelu)
_NEAR = 1e-5
_FAR = (20.0, 100.0, 1e4)
"""Where a GELU that is clipped shows itself."""


def form_of(module: Any) -> Form | None:
    """Return the form of torch's GELU that a module computes; None where it is something else."""
    if "gelu" not in type(module).__name__.lower() or not _is_plain(module):
        return None
    found = _tried(module)
    return None if found is None else next((f for f in FORMS if _are_near(found, _at(f))), None)


def _is_plain(module: nn.Module) -> bool:
    """Whether its forward is all there is to it."""
    holds = [*module.parameters(), *module.buffers(), *module.children()]
    return not holds and "forward" not in vars(module) and not has_hooks(module)


def _tried(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what a copy of the module makes of the grid; None where it cannot be told.

    It may draw random numbers or keep something, which must not be seen in the run.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            return _at(partial(type(module).forward, copy.copy(module)))
    except Exception:  # noqa: BLE001  whatever it wants is more than a GELU would
        return None


def _at(function: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a function's values and slopes on a grid, on the host and in float32."""
    near = torch.linspace(-12.0, 12.0, 961, dtype=torch.float32, device="cpu")
    far = torch.tensor(_FAR, dtype=torch.float32, device="cpu")
    with torch.enable_grad():
        grid = torch.cat([near, far, -far]).requires_grad_()
        values = function(grid)
        (slopes,) = torch.autograd.grad(values.sum(), grid)
    return values.detach(), slopes


def _are_near(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=_NEAR, atol=_NEAR)
        for one, other in zip(found, expected, strict=True)
    )
