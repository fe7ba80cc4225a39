"""What optimizers keep of each parameter, and how many bytes a model takes with its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anytrain.core.facts import ModelFacts

KEPT_BY: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.Adadelta: ("square_avg", "acc_delta"),
    torch.optim.Adagrad: ("sum",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adamax: ("exp_avg", "exp_inf"),
    torch.optim.NAdam: ("exp_avg", "exp_avg_sq", "mu_product"),
    torch.optim.RAdam: ("exp_avg", "exp_avg_sq"),
    torch.optim.RMSprop: ("square_avg",),
}
"""What torch's optimizers keep of each parameter that they have trained, besides its step."""
KEPT_FOR = {
    "amsgrad": "max_exp_avg_sq",
    "centered": "grad_avg",
    "momentum": "momentum_buffer",
}
"""What an optimizer keeps where an option is on."""
_SCALARS = ("mu_product",)


def kept_by(optimizer: Any) -> tuple[str, ...]:
    """Return what an optimizer surely keeps of a parameter, besides its step; () if unknown."""
    return next((names for kind, names in KEPT_BY.items() if isinstance(optimizer, kind)), ())


def model_facts(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> ModelFacts:
    """Return what models take with their optimizers, whether or not anything was trained yet."""
    tensors: dict[int, torch.Tensor] = {}
    for model in models:
        tensors |= {id(each): each for each in (*model.parameters(), *model.buffers())}
    held = [each for each in tensors.values() if not nn.parameter.is_lazy(each)]
    states = [_state_bytes(optimizer) for optimizer in optimizers]
    known = [size for size in states if size is not None]
    return ModelFacts(
        weight_bytes=sum(each.nbytes for each in held),
        gradient_bytes=sum(each.nbytes for each in held if each.requires_grad),
        optimizer_bytes=sum(known) if len(known) == len(states) else None,
    )


def _state_bytes(optimizer: Optimizer) -> int | None:
    """Return what one of torch's optimizers keeps; None for another's."""
    kind = type(optimizer)
    is_plain = isinstance(optimizer, torch.optim.SGD)
    if not kind.__module__.startswith("torch.optim") or not (is_plain or kept_by(optimizer)):
        return None
    return sum(
        _kept_bytes(parameter, group, kept_by(optimizer))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad or parameter in optimizer.state  # Adagrad's is there at once
        if not nn.parameter.is_lazy(parameter)
    )


def _kept_bytes(parameter: torch.Tensor, group: Mapping[str, Any], always: tuple[str, ...]) -> int:
    names = [*always, *(name for option, name in KEPT_FOR.items() if group.get(option))]
    scalars = [name for name in names if name in _SCALARS] + (["step"] if always else [])
    scalar_bytes = 8 if torch.get_default_dtype() is torch.float64 else 4
    num_alike = sum(name not in _SCALARS for name in names)
    return num_alike * parameter.nbytes + len(scalars) * scalar_bytes
