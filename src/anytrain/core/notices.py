"""Say something the user should know: one line, `anytrain: ...`, and to Python a warning.

It is a warning, so that `warnings.filterwarnings`, `-W` and `pytest.warns` treat it as they treat
any other. Python would show it with a file, a line of anytrain's source and the category's name,
none of which helps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import cast

from anytrain.core import environment
from anytrain.core.errors import Notice

_PYTHONS = ("warnings", "_py_warnings")


def give_notice(text: str, *, stacklevel: int = 1) -> None:
    """Warn of something, by a `Notice`; 1 is the line that calls this, as in `warnings.warn`.

    Where a program shows warnings its own way, it shows this one so, too.
    """
    usual = warnings.formatwarning
    if usual.__module__ in _PYTHONS:
        # For this one warning: a formatter that stayed would be found by whoever puts in another.
        warnings.formatwarning = cast("Callable[..., str]", _formatted)
    try:
        warnings.warn(text, Notice, stacklevel=stacklevel + 1)
    finally:
        if usual.__module__ in _PYTHONS:
            warnings.formatwarning = usual


def as_a_line(message: Warning | str) -> str:
    """Return a notice as it is shown.

    >>> as_a_line("Passed over step-3:\\n  why: it is cut.")
    'anytrain: Passed over step-3: why: it is cut.'
    """
    return f"anytrain: {' '.join(str(message).split())}"


def _formatted(message: Warning | str, *place: object, **more: object) -> str:
    return f"{as_a_line(message)}\n"


def notify_caller(text: str) -> None:
    """Warn once for the job, at the line outside anytrain that asked."""
    if environment.read().place.rank != 0:
        return
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    give_notice(text, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module == "anytrain" or module.startswith("anytrain.")
