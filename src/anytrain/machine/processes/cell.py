"""A notebook's cell as its child processes reach it: text streams, and pages that change.

A child has no kernel. What it prints comes through pipes, and a page (one output that is
updated in place) as lines of JSON through a third one.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any, TextIO

from anytrain.core import environment

PIPE = "ANYTRAIN_CELL"
"""The variable that tells a child by which pipe it shows pages in a notebook's cell."""
_CHUNK = 2**16


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel; IPython in a terminal is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


def pipe() -> int | None:
    """Return the pipe to the cell of the notebook that launched this process; None without."""
    number = environment.variable(PIPE)
    try:
        # A program that a child starts inherits the variable, not the pipe.
        is_open = number is not None and stat.S_ISFIFO(os.fstat(int(number)).st_mode)
    except (OSError, ValueError):
        return None
    return int(number) if number is not None and is_open else None


class Page:
    """One output of the cell, held by a child: shown once, then updated."""

    def __init__(self, pipe: int, rendering: Mapping[str, str]) -> None:
        self._pipe = pipe
        self.update(rendering)

    def update(self, rendering: Mapping[str, str], raw: bool = True) -> None:
        """Replace what the page shows; by MIME type."""
        line = json.dumps([f"{os.getpid()}-{id(self)}", dict(rendering)]) + "\n"
        data = line.encode()
        try:
            while data:
                data = data[os.write(self._pipe, data) :]
        except OSError:
            return  # nobody looks any more: the run goes on


def copy_text(pipe: IO[bytes], stream: TextIO, prefix: str) -> threading.Thread:
    """Copy a child's output to this process's, from a thread, until the child has ended."""
    return _thread(_copy_text, pipe, stream, prefix)


def copy_pages(pipe: IO[bytes]) -> threading.Thread:
    """Show the pages of a child in this process's cell, from a thread."""
    return _thread(_copy_pages, pipe)


def _thread(target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="anytrain-cell", daemon=True)
    thread.start()
    return thread


def _copy_text(pipe: IO[bytes], stream: TextIO, prefix: str) -> None:
    # A character of several bytes may come in two parts.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with pipe:
        if prefix:
            for line in pipe:
                stream.write(prefix + line.decode(errors="replace"))
                stream.flush()
            return
        # Not by lines: a progress bar ends its lines only when it is done.
        while chunk := os.read(pipe.fileno(), _CHUNK):
            stream.write(decoder.decode(chunk))
            stream.flush()


def _copy_pages(pipe: IO[bytes]) -> None:
    from IPython.display import display

    shown: dict[str, Any] = {}
    with pipe:
        for line in pipe:
            name, rendering = json.loads(line)
            if name in shown:
                shown[name].update(rendering, raw=True)
            else:
                shown[name] = display(rendering, raw=True, display_id=True)
