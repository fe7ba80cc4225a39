"""Arguments as plain values: for JSON, for trackers, for the eye."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from enum import Enum
from typing import Any

from anytrain.doors.training_args.fields import Fields
from anytrain.doors.training_args.legacy import RULES, shown


class Record(Fields):
    """Ways to write arguments down; tokens are never written."""

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as plain values; old names, which hold nothing, are left out."""
        return {name: _plain(name, value) for name, value in self._listed()}

    def to_json_string(self) -> str:
        """Return the arguments as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the arguments as numbers and text alone, as trackers take them."""
        sizes = {
            "train_batch_size": self.per_device_train_batch_size,
            "eval_batch_size": self.per_device_eval_batch_size,
        }
        kinds: tuple[type, ...] = (bool, int, float, str)
        torch = sys.modules.get("torch")
        if torch is not None:
            kinds = (*kinds, torch.Tensor)
        return {
            name: value if type(value) in kinds else str(value)
            for name, value in {**self.to_dict(), **sizes}.items()
        }

    def __str__(self) -> str:
        lines = "".join(f"{n}={shown(n, v)},\n" for n, v in sorted(self._listed()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__

    def _listed(self) -> list[tuple[str, Any]]:
        named = [(f.name, getattr(self, f.name)) for f in fields(self) if f.init]
        return [(name, value) for name, value in named if name not in RULES]


def _plain(name: str, value: Any) -> Any:
    if name.endswith("_token"):
        return shown(name, value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [item.value if isinstance(item, Enum) else item for item in value]
    if isinstance(value, dict):
        return {key: _plain_item(str(key), item) for key, item in value.items()}
    if name == "accelerator_config" and hasattr(value, "to_dict"):
        return value.to_dict()
    return _plain_item(name, value)


def _plain_item(key: str, value: Any) -> Any:
    """Return a setting's value: a dtype by its name, and a configuration as a dict."""
    if isinstance(value, dict):
        return {inner: _plain_item(str(inner), item) for inner, item in value.items()}
    if key.endswith("dtype") and value is not None and not isinstance(value, str):
        return str(value).split(".")[-1]
    if key == "quantization_config" and hasattr(value, "to_dict"):
        return value.to_dict()
    return value
