"""A notebook's cell as its child processes reach it: text streams, and pages that change.

A child has no kernel. What it prints comes through pipes, and a page (one output that is
updated in place) as lines of JSON through a third one.
"""

from __future__ import annotations

import codecs
import json
import os
import selectors
import stat
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, TextIO

from anytrain.core import environment

PIPE = "ANYTRAIN_CELL"
"""The variable that tells a child by which pipe it shows pages in a notebook's cell."""
_CHUNK = 2**16
_LOOK_S = 0.2


def cell_pipe() -> int | None:
    """Return the pipe to the cell of the notebook that launched this process; None without."""
    number = environment.variable(PIPE)
    try:
        # A program that a child starts inherits the variable, not the pipe.
        is_open = number is not None and stat.S_ISFIFO(os.fstat(int(number)).st_mode)
    except (OSError, ValueError):
        return None
    return int(number) if number is not None and is_open else None


class CellOutput:
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


class PipeReader:
    """A thread that shows what comes through a pipe, until it ends or nobody waits for more."""

    def __init__(self, pipe: IO[bytes], show: Callable[[bytes], None]) -> None:
        self._pipe, self._show = pipe, show
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anytrain-cell", daemon=True)
        self._thread.start()

    def end(self, deadline: float) -> None:
        """Wait for the pipe's end until then, by the monotonic clock, and close it."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._is_over.set()
        self._thread.join(5 * _LOOK_S)

    def _run(self) -> None:
        with self._pipe, selectors.DefaultSelector() as ready:
            ready.register(self._pipe, selectors.EVENT_READ)
            while not self._is_over.is_set():
                # A process that a child has left behind may hold the other end for ever.
                if ready.select(_LOOK_S):
                    chunk = os.read(self._pipe.fileno(), _CHUNK)
                    self._show(chunk)
                    if not chunk:
                        return


def copy_text(pipe: IO[bytes], stream: TextIO, prefix: str) -> PipeReader:
    """Copy a child's output to this process's, from a thread."""
    # A character of several bytes may come in two parts.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    lines = _Lines()

    def show(chunk: bytes) -> None:
        if prefix:
            stream.write("".join(prefix + line.decode(errors="replace") for line in lines(chunk)))
        else:
            # Not by lines: a progress bar ends its lines only when it is done.
            stream.write(decoder.decode(chunk, final=not chunk))
        stream.flush()

    return PipeReader(pipe, show)


def show_cell_outputs(pipe: IO[bytes]) -> PipeReader:
    """Show the pages of a child in this process's cell, from a thread."""
    from IPython.display import display

    shown: dict[str, Any] = {}
    lines = _Lines()

    def show(chunk: bytes) -> None:
        for line in lines(chunk):
            name, rendering = json.loads(line)
            if name in shown:
                shown[name].update(rendering, raw=True)
            else:
                shown[name] = display(rendering, raw=True, display_id=True)

    return PipeReader(pipe, show)


class _Lines:
    """Whole lines out of chunks; at the end, of which an empty chunk tells, the rest."""

    def __init__(self) -> None:
        self._rest = b""

    def __call__(self, chunk: bytes) -> list[bytes]:
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        lines = [line + b"\n" for line in whole]
        return lines if chunk or not self._rest else [*lines, self._rest]
