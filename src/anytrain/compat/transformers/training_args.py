"""HF's module `transformers.training_args`."""

from __future__ import annotations

from typing import Any

from anytrain.compat.transformers import other_names
from anytrain.core.errors import BadInput
from anytrain.doors.training_args import (
    OptimizerNames,
    ParallelMode,
    TrainingArguments,
)
from anytrain.doors.training_args.convert import scalar_from_text
from anytrain.doors.training_args.fields import LOG_LEVELS

__all__ = ["OptimizerNames", "ParallelMode", "TrainingArguments", "str_to_bool"]

trainer_log_levels = dict(LOG_LEVELS)
log_levels = {word: level for word, level in LOG_LEVELS.items() if word != "passive"}

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str, to_bool: bool = True) -> int | bool:
    """Return whether a word says yes, as a bool or as 1 and 0."""
    word = value.lower()
    if word not in (*_TRUE, *_FALSE):
        raise BadInput(
            f"Cannot tell whether {value!r} is true or false.",
            why=f"true is one of {', '.join(_TRUE)}; false one of {', '.join(_FALSE)}.",
            fix="use one of these words.",
        )
    return word in _TRUE if to_bool else int(word in _TRUE)


def _convert_str_dict(passed_value: dict[str, Any]) -> dict[str, Any]:
    """Return the dict itself, its text turned into the numbers and truths that it spells."""
    passed_value.update(scalar_from_text(passed_value))
    return passed_value


__getattr__ = other_names.module_getattr(__name__)
