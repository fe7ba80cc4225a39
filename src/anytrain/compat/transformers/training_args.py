"""HF's module `transformers.training_args`."""

from anytrain.core.errors import BadInput
from anytrain.doors.training_args import (
    OptimizerNames,
    ParallelMode,
    TrainingArguments,
)

__all__ = ["OptimizerNames", "ParallelMode", "TrainingArguments", "str_to_bool"]

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
