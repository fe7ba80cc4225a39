"""Leave a rank's Python stack where its launcher finds it after a crash.

Two ways: the interpreter's own fault handler writes the stack of a native crash, and a thread
writes down where the main thread is, for ends that leave no time for words. Next to
nothing is imported, so that it can begin before anything else.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

from anytrain.core import environment
from anytrain.machine.processes import notes

LOOK_EVERY_S = 0.25
_MOST_FRAMES = 100
_MOST_LINES = 6
_SLOT = 8192
_STDLIB = os.path.dirname(os.__file__)
_OURS = str(Path(__file__).parents[2])
_STARTER = str(Path(__file__).with_name("child.py"))
_FATAL = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
_THREAD = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+)")
_PACKAGES = re.compile(r"(?:site|dist)-packages/")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class Frame(NamedTuple):
    """One call of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether it is Python's, anytrain's or an installed package's, not the script's own."""
        return is_library(self.file)

    def __str__(self) -> str:
        return f"{_short(self.file)} line {self.line}, in {self.function}"


@dataclass(frozen=True, slots=True)
class SeenStack:
    """The main thread's stack, innermost first, and when it was looked at."""

    stack: tuple[Frame, ...]
    at: float


_kept: dict[int, IO[bytes]] = {}
"""The file of this process: the fault handler knows its number alone, so it must stay open."""


def dump_stacks(folder: str, rank: int) -> None:
    """Leave this process's stack in the launcher's folder, whatever ends it.

    A fault handler that somebody has set up already keeps the file it writes to.
    """
    if os.getpid() in _kept:
        return
    with suppress(OSError):  # the launcher and its folder are gone: nobody will ask
        # The name holds the pid: a process that the rank starts must not write into its file.
        file = _path(folder, rank, os.getpid(), "fault").open("wb", buffering=0)
        file.write(f"main 0x{threading.main_thread().ident or 0:016x}\n".encode())
        _kept[os.getpid()] = file
        if not faulthandler.is_enabled():
            faulthandler.enable(file)
        places = StackFile(folder, rank)
        threading.Thread(
            target=_look_on, args=(places,), name="anytrain-place", daemon=True
        ).start()


def watch_rank() -> None:
    """Do so where a launcher of ours started this process; its loading workers are not it."""
    folder = environment.variable("ANYTRAIN_BEATS")
    # multiprocessing's processes are started with this word, and import the script again.
    if folder is not None and "--multiprocessing-fork" not in sys.orig_argv:
        rank = int(environment.variable("RANK") or 0)
        dump_stacks(folder, rank)
        _end_quietly(folder, rank)


def _end_quietly(folder: str, rank: int) -> None:
    """Let an interrupt end this process without its traceback: the launcher says where it was."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt) and not environment.read().debug:
            notes.leave(folder, rank, "interrupt", "")
        else:
            shown(kind, error, trace)

    sys.excepthook = show


def crash_stack(folder: str | Path, rank: int, pid: int, signum: int) -> tuple[Frame, ...]:
    """Return the stack that a crash with this signal left, innermost first; () if none."""
    try:
        text = _path(folder, rank, pid, "fault").read_text(errors="replace")
    except OSError:
        return ()
    head, *crashes = text.split("Fatal Python error: ")
    if not crashes:
        return ()
    # A forked process shares the file: only the last dump, and of this signal, is the rank's.
    name = crashes[-1].splitlines()[0].strip()
    if _FATAL.get(name) != signum:
        return ()
    stacks = _stacks(crashes[-1].splitlines())
    main = head.partition("main ")[2].strip()
    # A crash in a native thread has no Python frame; the main thread's place is still telling.
    return stacks.get("current") or stacks.get(main) or ()


def last_seen(folder: str | Path, rank: int, pid: int) -> SeenStack | None:
    """Return where the rank's main thread was when it was last looked at."""
    try:
        raw = _path(folder, rank, pid, "place").read_bytes()
        begin = 1 + raw[0] * _SLOT
        at, frames = json.loads(raw[begin : begin + _SLOT].rstrip(b"\0"))
        return SeenStack(tuple(Frame(*frame) for frame in frames), float(at))
    except (OSError, ValueError, TypeError, IndexError):
        return None


def known_processes(folder: str | Path) -> list[tuple[int, int]]:
    """Return rank and number of every process that has been here, the latest last."""
    found = []
    for path in Path(folder).glob("rank-*.fault"):
        _, rank, pid = path.stem.split("-")
        with suppress(OSError):
            found.append((path.stat().st_mtime, int(rank), int(pid)))
    return [(rank, pid) for _, rank, pid in sorted(found)]


def main_stack() -> tuple[Frame, ...]:
    """Return this process's main thread's stack, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[Frame] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(frames)


def own_frame(stack: Iterable[Frame]) -> Frame | None:
    """Return the innermost call that is the script's own."""
    return next((frame for frame in stack if not frame.is_library), None)


def describe(stack: Sequence[Frame], indent: str = "    ") -> str:
    """Show a stack in a few lines, innermost first; calls inside libraries are folded.

    >>> lib = "/x/site-packages/torch/nn/"
    >>> print(describe([Frame(lib + "a.py", 1, "f"), Frame(lib + "b.py", 2, "g"),
    ...                 Frame("/home/me/train.py", 3, "step")], indent=""))
    torch/nn/a.py line 1, in f (1 more call in torch)
    /home/me/train.py line 3, in step
    """
    frames = list(stack)
    if len(frames) > 1 and frames[-1].file == "<string>" and frames[-2].file == _STARTER:
        del frames[-1]  # the words that a fresh process was started with
    while frames and frames[-1].is_library and any(not frame.is_library for frame in frames):
        del frames[-1]  # how the script was started says nothing
    lines: list[str] = []
    at = 0
    while at < len(frames) and len(lines) < _MOST_LINES:
        end = at + 1
        while frames[at].is_library and end < len(frames) and frames[end].is_library:
            end += 1
        lines.append(f"{indent}{frames[at]}{_folded(frames[at:end])}")
        at = end
    if at < len(frames):
        more = len(frames) - at
        lines.append(f"{indent}... and {more} call{'s' * (more > 1)} more, outside of these")
    return "\n".join(lines)


def is_library(path: str) -> bool:
    """Whether a file is Python's, anytrain's or an installed package's."""
    return path.startswith((_STDLIB, _OURS, "<frozen")) or bool(_PACKAGES.search(path))


class StackFile:
    """A small file, kept in memory, that holds where the main thread was last seen.

    A look takes turns between two slots and names the newer one by its last write, a byte: an
    end in the middle of a look leaves the one before it.
    """

    def __init__(self, folder: str, rank: int) -> None:
        path = _path(folder, rank, os.getpid(), "place")
        with path.open("w+b") as file:
            file.truncate(1 + 2 * _SLOT)
            self._memory = mmap.mmap(file.fileno(), 1 + 2 * _SLOT)

    def look(self) -> None:
        """Write down where the main thread is; a file on a disk would take twenty times longer."""
        frames = main_stack()
        text = json.dumps([time.time(), frames]).encode()
        while len(text) > _SLOT:
            frames = frames[: len(frames) // 2]
            text = json.dumps([time.time(), frames]).encode()
        slot = 1 - self._memory[0]
        self._memory[1 + slot * _SLOT : 1 + (slot + 1) * _SLOT] = text.ljust(_SLOT, b"\0")
        self._memory[0] = slot


def _look_on(places: StackFile) -> None:
    while True:
        places.look()
        time.sleep(LOOK_EVERY_S)


def _stacks(lines: list[str]) -> dict[str, tuple[Frame, ...]]:
    """Return the stacks of a dump by thread; the one that crashed is "current"."""
    found: dict[str, list[Frame]] = {}
    here: list[Frame] = []
    for line in lines:
        if thread := _THREAD.match(line):
            here = found.setdefault("current" if thread[1] != "Thread" else thread[2], [])
            if thread[1] != "Thread":
                found[thread[2]] = here
        elif frame := _FRAME.match(line):
            number = int(frame[2]) if frame[2].isdigit() else 0
            here.append(Frame(frame[1], number, frame[3]))
        elif line.startswith("Extension modules"):
            break
    return {thread: tuple(frames) for thread, frames in found.items()}


def _folded(frames: Sequence[Frame]) -> str:
    if len(frames) == 1:
        return ""
    homes = {_package(frame.file) for frame in frames[1:]}
    where = f" in {homes.pop()}" if len(homes) == 1 else " in libraries"
    return f" ({len(frames) - 1} more {'call' if len(frames) == 2 else 'calls'}{where})"


def _package(path: str) -> str:
    if _PACKAGES.search(path) or path.startswith(_OURS):
        return _short(path).split("/")[0]
    return "Python's library"


def _short(path: str) -> str:
    """Return a package's file from the package on, a notebook's cell by its number."""
    if cell := _cell(path):
        return cell
    if _PACKAGES.search(path):
        return _PACKAGES.split(path)[-1]
    if path.startswith(_STDLIB + os.sep):
        return path[len(_STDLIB) + 1 :]
    if path.startswith(_OURS):
        return os.path.relpath(path, os.path.dirname(_OURS))
    return path


def _cell(path: str) -> str | None:
    """Return what this notebook calls the code behind a name that is no file."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    name = None if shell is None else shell.compile.format_code_name(path)
    return None if name is None else " ".join(name)


def _path(folder: str | Path, rank: int, pid: int, kind: str) -> Path:
    return Path(folder) / f"rank-{rank}-{pid}.{kind}"
