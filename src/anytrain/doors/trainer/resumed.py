"""Say which arguments a resumed run leaves aside, because the checkpoint has settled them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from anytrain.core.errors import Notice

_SETTLED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""What an optimizer's saved state holds."""


def tell_settled(arguments: Path, given: Any) -> None:
    """Give notice of arguments that differ from those that the checkpoint was made with."""
    try:
        saved = json.loads(arguments.read_text())
        kept = {name: saved[name] for name in _SETTLED if name in saved}
    except (OSError, ValueError, TypeError):
        return  # another library's, or one that a subclass writes: there is nothing to compare
    changed = [
        f"{name} {value:g} (given: {getattr(given, name):g})"
        for name, value in kept.items()
        if value != getattr(given, name)
    ]
    if changed:
        warnings.warn(
            f"The run goes on with its checkpoint's {', '.join(changed)}: an optimizer's settings "
            "are part of its state. To train on with others, begin a new run from the saved model.",
            Notice,
            stacklevel=5,
        )
