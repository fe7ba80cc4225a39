"""Take the values of a record as they should be, and as nothing where they are not.

A record may come from an older version, or be damaged: a page tells what is there.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

_LONGEST = 300


def mapping(value: Any) -> dict[str, Any]:
    """Return an object; an empty one for anything else."""
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list."""
    return [mapping(each) for each in listed(value) if isinstance(each, dict)]


def listed(value: Any) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return value if isinstance(value, list) else []


def real(value: Any) -> float | None:
    """Return a number, which may be NaN; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def finite(value: Any) -> float | None:
    """Return a number that is one; None for anything else."""
    found = real(value)
    return found if found is not None and math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """Return a finite number as a whole one; None for anything else."""
    found = finite(value)
    return None if found is None else int(found)


def text(value: Any, longest: int = _LONGEST) -> str:
    """Return any value as text, cut where it is very long."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    found = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return found if len(found) <= longest else f"{found[:longest]}…"


def moment(seconds: Any) -> str:
    """Return a time since 1970 as date and time here; nothing where there is none."""
    found = finite(seconds)
    try:
        # With its zone: a report is read elsewhere, too.
        return "" if found is None else time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(found))
    except (ValueError, OverflowError, OSError):
        return ""
