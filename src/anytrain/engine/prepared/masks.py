"""The attention masks of transformers' models on devices that trace."""

from __future__ import annotations

import sys
from typing import Any

_MODULE = "transformers.masking_utils"


def leave_unread(device_type: str) -> None:
    """Keep transformers from reading the values of masks on devices that trace; for the process.

    To read one runs a graph and waits, in each forward pass; and a mask that hides nothing would
    be left out, which is another graph.
    """
    module: Any = sys.modules.get(_MODULE)
    own = getattr(module, "is_tracing", None)
    if own is None or hasattr(own, "unread"):
        return

    def is_tracing(tensor: Any = None) -> Any:
        device = getattr(tensor, "device", None)
        return own(tensor) if device is None else device.type == device_type or own(tensor)

    is_tracing.unread = device_type  # type: ignore[attr-defined]
    module.is_tracing = is_tracing
