"""Let print write a line and its end in one, so that the lines of several ranks never mix.

torch's launcher starts python unbuffered, where each part of a print is a write of its own. Python
imports this module by itself in a child whose path begins with this folder.
"""

from __future__ import annotations

import builtins
from typing import Any

_print = builtins.print


def _whole(
    *values: object, sep: str | None = None, end: str | None = None, file: Any = None, **more: Any
) -> None:
    words = (" " if sep is None else sep).join(map(str, values))
    _print(words + ("\n" if end is None else end), end="", file=file, **more)


builtins.print = _whole
