"""Turn what people log into what libraries can store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def read(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values with tensors and arrays of one element as Python numbers.

    Tensors of one device and dtype cross to the host together, so a log waits for the device
    once and not once per value. Everything else passes as it is.

    >>> read({"loss": torch.tensor(0.5), "eval": {"hits": np.int64(3)}, "note": "warm"})
    {'loss': 0.5, 'eval': {'hits': 3}, 'note': 'warm'}
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    _find(values, groups)
    numbers: dict[int, Any] = {}
    for group in groups.values():
        on_host = torch.stack([tensor.detach().reshape(()) for tensor in group]).tolist()
        numbers.update(zip(map(id, group), on_host, strict=True))
    return _replace(values, numbers)


def _find(
    values: Mapping[Any, Any],
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]],
) -> None:
    for value in values.values():
        if isinstance(value, Mapping):
            _find(value, groups)
        elif isinstance(value, torch.Tensor) and _is_number(value):
            groups.setdefault((value.device, value.dtype), []).append(value)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() == 1


def _replace(values: Mapping[Any, Any], numbers: dict[int, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            plain[str(key)] = _replace(value, numbers)
        elif isinstance(value, np.generic | np.ndarray) and value.size == 1:
            plain[str(key)] = value.item()
        else:
            plain[str(key)] = numbers.get(id(value), value)
    return plain


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as one level, their keys joined by a slash.

    >>> flatten({"eval": {"loss": 1, "by": {"task": 2}}})
    {'eval/loss': 1, 'eval/by/task': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{inner}": v for inner, v in flatten(value).items()})
        else:
            flat[str(key)] = value
    return flat


def settings(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a config made of mappings, lists, numbers, strings and None; the rest as its text.

    >>> settings({"dtype": torch.float16, "betas": (0.9, 0.99), "model": {"layers": 2}})
    {'dtype': 'torch.float16', 'betas': [0.9, 0.99], 'model': {'layers': 2}}
    """
    return {key: _simple(value) for key, value in read(config).items()}


def _simple(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _simple(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_simple(inner) for inner in value]
    return str(value)
