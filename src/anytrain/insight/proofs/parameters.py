"""Find out which weight an optimizer's numbered parameter is.

A run of ours records the names. For other states: torch records them when the optimizer was built
from named parameters; else a shape that occurs once tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def parameter_names(
    models: Sequence[Mapping[str, Any]], optimizer: Mapping[str, Any]
) -> dict[int, str]:
    """Return the names of an optimizer's parameters by number, as far as they are certain."""
    recorded = {
        number: name
        for group in optimizer["param_groups"]
        for number, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    return recorded or _by_shape(models, optimizer)


def _by_shape(models: Sequence[Mapping[str, Any]], optimizer: Mapping[str, Any]) -> dict[int, str]:
    weights: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for model in models:
        for name, value in model.items():
            if isinstance(value, torch.Tensor):
                weights[tuple(value.shape)].add(name)
    numbers: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for number, state in optimizer["state"].items():
        numbers[_shape(state)].add(number)
    return {
        min(held): min(weights[shape])
        for shape, held in numbers.items()
        if shape and len(held) == len(weights[shape]) == 1
    }


def _shape(state: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the one shape of a parameter's state; () where it has none, or several."""
    shapes = {tuple(v.shape) for v in state.values() if isinstance(v, torch.Tensor) and v.ndim}
    return shapes.pop() if len(shapes) == 1 else ()
