"""How a process learns that its parent is gone, and goes on where its terminal is.

A pipe, for children that run our code from their first line. The parent holds one end and writes
nothing. When it ends, by SIGKILL too, the system closes that end, and each child ends itself, with
everything it has started.

Linux's parent death signal (prctl), for children that run anything: it is set before the child's
program begins. When the parent ends, the system sends the child SIGTERM.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

_FLUSH_S = 0.2
_SET_DEATH_SIGNAL, _GET_DEATH_SIGNAL = 1, 2
"""Linux's PR_SET_PDEATHSIG and PR_GET_PDEATHSIG."""
# Runs in the child and becomes the command, which keeps the setting and the process's number. Who
# asks for the parent after it is set cannot miss its end. An interrupt here ends without a word.
_DEATH_SIGNAL_STARTER = f"""
import os, signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
import ctypes
ctypes.CDLL(None).prctl({_SET_DEATH_SIGNAL}, ctypes.c_ulong(signal.SIGTERM))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_held: set[int] = set()
"""The parent's ends of this process: a fork that kept one would keep other forks alive."""


@contextmanager
def liveness_pipe() -> Iterator[tuple[int, int]]:
    """Give the child's end and the parent's end, for as long as the children live."""
    ends = os.pipe()
    _held.add(ends[1])
    try:
        yield ends
    finally:
        _held.discard(ends[1])
        for end in ends:
            os.close(end)


def close_liveness_pipes() -> None:
    """Close the parent's ends, of every launch that is under way, in a fork of the parent."""
    for end in _held:
        with suppress(OSError):
            os.close(end)
    _held.clear()


def exit_with_parent(end: int, folder: str) -> None:
    """Watch the parent from a thread; when it is gone, clear the folder and end the group."""
    threading.Thread(
        target=_exit_with_parent, args=(end, folder), name="anytrain-parent", daemon=True
    ).start()


def _exit_with_parent(end: int, folder: str) -> None:
    while not select.select([end], [], [], _FLUSH_S)[0]:
        # What was printed without an end of line must not wait for one.
        _flush()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError, RuntimeError):
            continue  # closed, replaced, or being written to by a signal's handler


def with_death_signal(command: Sequence[str]) -> list[str]:
    """Return a command that runs this one, and gets SIGTERM when this process ends.

    The thread that starts it must live as long as this process: the system watches that thread.
    Elsewhere than on Linux there is no such signal, and the command stays as it is.
    """
    if sys.platform != "linux":
        return list(command)
    # Neither the folder it starts in nor installed packages: this takes 50 ms, not a second.
    return [sys.executable, "-P", "-S", "-c", _DEATH_SIGNAL_STARTER, str(os.getpid()), *command]


def clear_death_signal() -> int:
    """Outlive the parent from now on; return the death signal that was set, 0 for none."""
    if sys.platform != "linux":
        return 0
    found = ctypes.c_int(0)
    libc = ctypes.CDLL(None)
    libc.prctl(_GET_DEATH_SIGNAL, ctypes.byref(found))
    libc.prctl(_SET_DEATH_SIGNAL, ctypes.c_ulong(0))
    return found.value


def set_death_signal(signum: int) -> None:
    """Get this signal when the parent ends; 0, as `clear_death_signal` may say, does nothing."""
    if signum:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, ctypes.c_ulong(signum))


def replace_lost_terminal(descriptors: Iterable[int] = (1, 2)) -> None:
    """Put the null device in the place of a terminal that is gone, so that prints go on.

    A print between the request to stop and the save would end the run without one.
    """
    for descriptor in descriptors:
        if _terminal_is_gone(descriptor):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, descriptor)
            os.close(nothing)


def _terminal_is_gone(descriptor: int) -> bool:
    try:
        import termios
    except ImportError:  # Windows closes a terminal's programs with it
        return False
    try:
        termios.tcgetattr(descriptor)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False
