"""Find out which weight an optimizer's numbered parameter is.

An optimizer's state knows its parameters by number. Torch records their names only when it was
built from named ones; else they are told by shape and order, where those leave no doubt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def parameter_names(
    models: Sequence[Mapping[str, Any]], optimizer: Mapping[str, Any]
) -> dict[Any, str]:
    """Return the names of an optimizer's parameters by number, as far as they are certain."""
    groups = optimizer["param_groups"]
    recorded = {
        number: name
        for group in groups
        for number, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    return recorded or _by_shape(models, optimizer)


def _by_shape(
    models: Sequence[Mapping[str, Any]], optimizer: Mapping[str, Any]
) -> dict[Any, str]:
    """Pair weights and parameters of one shape in their order.

    That is certain where they are as many and in one group, which keeps the model's order.
    """
    weights: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, tensor in _distinct(models):
        weights[tuple(tensor.shape)].append(name)
    numbers: dict[tuple[int, ...], list[tuple[int, Any]]] = defaultdict(list)
    for index, group in enumerate(optimizer["param_groups"]):
        for number in group["params"]:
            shape = _shape(optimizer["state"].get(number, {}))
            if shape is not None:
                numbers[shape].append((index, number))
    named: dict[Any, str] = {}
    for shape, held in numbers.items():
        if len(held) == len(weights[shape]) and len({group for group, _ in held}) == 1:
            named.update(zip((number for _, number in held), weights[shape], strict=True))
    return named


def _distinct(models: Sequence[Mapping[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Return each floating tensor once, under the first of its names."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for index, model in enumerate(models):
        for name, value in model.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                say = name if len(models) == 1 else f"model {index}, {name}"
                found.setdefault(id(value), (say, value))
    return list(found.values())


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a parameter whose state has tensors of that one shape only."""
    shapes = {tuple(v.shape) for v in state.values() if isinstance(v, torch.Tensor) and v.ndim}
    return shapes.pop() if len(shapes) == 1 else None
