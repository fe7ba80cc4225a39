"""What a ready job says: notices as one line each, and errors as what, why and fix."""

from __future__ import annotations

import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from anytrain.core import environment
from anytrain.core.errors import AnytrainError, Notice
from anytrain.core.notices import as_a_line

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@contextmanager
def notices_as_lines() -> Iterator[None]:
    """Show a Notice as one line, once, on the first rank alone; leave other warnings alone."""
    usual = warnings.showwarning
    shown: set[str] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, Notice):
            usual(message, category, filename, lineno, file, line)
        elif str(message) not in shown and environment.read().place.rank == 0:
            shown.add(str(message))
            sys.stderr.write(f"{as_a_line(message)}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        warnings.showwarning = show
        yield


@contextmanager
def says_how_to_resume(how: str = "the same command") -> Iterator[None]:
    """Say, where a signal has ended the run, what continues it."""
    try:
        yield
    except SystemExit as left:
        if left.code in _STOPPED and environment.read().place.rank == 0:
            sys.stderr.write(f"anytrain: {how} continues this run.\n")
        raise


def exit_code(job: Any) -> int:
    """Run a job and return the process's exit code, with our own errors put into words."""
    try:
        job()
    except AnytrainError as error:
        if environment.read().debug:
            traceback.print_exc()
        else:
            sys.stderr.write(f"anytrain: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
