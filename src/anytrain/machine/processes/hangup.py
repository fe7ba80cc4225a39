"""Go on where the terminal has been closed: writing to what is left of it is an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable


def let_go(descriptors: Iterable[int] = (1, 2)) -> None:
    """Put the null device in the place of a terminal that is gone, so that prints go on.

    A print between the request to stop and the save would end the run without one.
    """
    for descriptor in descriptors:
        if _is_gone(descriptor):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, descriptor)
            os.close(nothing)


def _is_gone(descriptor: int) -> bool:
    try:
        import termios
    except ImportError:  # Windows closes a terminal's programs with it
        return False
    try:
        termios.tcgetattr(descriptor)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False
