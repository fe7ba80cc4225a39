"""A child that begins as a copy of this process, as a launcher sees it.

Everything here is inherited: memory, modules, the notebook's variables. Threads are not, which
is why this is only done where it is asked for.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import signal
import sys
import warnings
from asyncio import events
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any


class Forked:
    """A fork of this process, with the face that `supervise` knows."""

    def __init__(self, process: Any, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        self._process = process
        self.pid: int = process.pid
        self.stdout, self.stderr = stdout, stderr

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal where one ended it; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """Return the exit code, minus the signal where one ended it; None while it runs."""
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)


def start(work: Callable[[], int], environ: Mapping[str, str], piped: bool) -> Forked:
    """Fork a process that leads its own session and exits with what `work` returns."""
    pipes = [os.pipe(), os.pipe()] if piped else []
    outputs = [end for _, end in pipes]

    def run() -> None:
        _begin(environ, outputs, [end for end, _ in pipes])
        try:
            code = work()
        finally:
            # multiprocessing runs these from Python 3.13 on; each removes itself.
            atexit._run_exitfuncs()
        sys.exit(code)

    process = multiprocessing.get_context("fork").Process(target=run)
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork beside threads; whoever asked for one was told.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    for end in outputs:
        os.close(end)
    ours: list[IO[bytes] | None] = [os.fdopen(end, "rb") for end, _ in pipes]
    return Forked(process, *(ours or [None, None]))


def _begin(environ: Mapping[str, str], outputs: list[int], close: list[int]) -> None:
    """Leave the parent's session, loop, output and exit hooks to the parent."""
    os.setsid()
    atexit._clear()
    events._set_running_loop(None)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in close:
        os.close(end)
    for number, end in zip((1, 2), outputs, strict=False):
        os.dup2(end, number)
        os.close(end)
    if outputs:
        # A kernel's streams speak to a thread that is not here.
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(os.fdopen(n, "wb", closefd=False), "utf-8", line_buffering=True)
            for n in (1, 2)
        )
    os.environ.update(environ)
    torch = sys.modules.get("torch")
    if torch is not None:
        # The threads that compute are not here either: OpenMP would wait for them for ever.
        torch.set_num_threads(1)
