"""Write the values of a record as a page shows them."""

from __future__ import annotations

import json
import time
from typing import Any

from anytrain.core.documents import finite

_LONGEST = 300


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
