"""Find out whether a loader's parts can be handed to worker processes."""

from __future__ import annotations

import pickle
from typing import Any

ENOUGH = 2**26
"""Bytes after which a pickle is believed to go through: a data set may hold all of its rows."""


class _Enough(Exception):
    """So much went through that the rest will."""


class _Nowhere:
    """A file that keeps nothing."""

    def __init__(self) -> None:
        self._written = 0

    def write(self, part: bytes) -> int:
        """Count what is written."""
        self._written += len(part)
        if self._written > ENOUGH:
            raise _Enough
        return len(part)


def handover_trouble(*parts: Any) -> str:
    """Say why some part of a loader cannot be pickled; empty where all can."""
    for part in parts:
        try:
            pickle.Pickler(_Nowhere(), protocol=5).dump(part)
        except _Enough:
            continue
        except Exception as error:  # noqa: BLE001  a user's object may raise anything
            words = str(error).strip().splitlines()
            return f"{type(part).__name__}: {words[0] if words else type(error).__name__}"
    return ""
