"""The attention masks of transformers' models on devices that trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from anytrain.core import patches

_MODULE = "transformers.masking_utils"


def values_unread(device_type: str) -> AbstractContextManager[None]:
    """Keep transformers from reading the values of masks on a device that traces, in the block.

    To read one runs a graph and waits, in each forward pass; and a mask that hides nothing would
    be left out, which is another graph.
    """
    return patches.shared("mask values", lambda: _leave_unread(device_type))


def _leave_unread(device_type: str) -> Callable[[], None] | None:
    module: Any = sys.modules.get(_MODULE)
    own = getattr(module, "is_tracing", None)
    if own is None:
        return None

    def is_tracing(tensor: Any = None) -> Any:
        device = getattr(tensor, "device", None)
        return own(tensor) if device is None else device.type == device_type or own(tensor)

    module.is_tracing = is_tracing
    return lambda: setattr(module, "is_tracing", own)
