"""Start processes that end together, see what the system says of them, and end them for certain.

Every child leads a session of its own: its data loading workers go with it, and a Ctrl-C in the
terminal reaches the launcher alone, which hands it on exactly once. Of one launch the processes
leave word in a folder; a launcher that was killed could not remove its own, so whoever launches
next removes the folders whose lock nobody holds any more.
"""

from __future__ import annotations

import atexit
import fcntl
import io
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from asyncio import events
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

import psutil

from anytrain.core import environment
from anytrain.machine.processes import stack_dumps
from anytrain.machine.processes.host_limits import Space, shared_memory
from anytrain.machine.processes.stack_dumps import Frame, SeenStack

GRACE_S = 600.0
"""How long a process may take to save its work after it was asked to stop; a second request ends
it at once."""
SURVIVOR_GRACE_S = 2.0
"""How long the others get once a rank has died: there is nothing they could finish together."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOADING_S = 60.0
"""How long a script may take to come to our code; one that never does is another's after that."""
_ONE_WISH_S = 0.5
"""Signals within so long are one wish, of whatever kind: a terminal's reaches the launcher, and a
program around it passes its own on."""
_cut_short: set[int] = set()
"""The processes that were killed after they had been asked to stop."""
_FOLDER_PREFIX = "anytrain-"
_FOLDER_LOCK = "launcher.lock"


class Process(Protocol):
    """A child as its parent sees it: what `start` returns, or a fork of this process."""

    pid: int
    returncode: int | Any
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        """Return the exit code, minus the signal where one ended it; None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""


class Stopped(BaseException):
    """This process was asked to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def stop_signals() -> list[signal.Signals]:
    """Return what stops a launcher: these, and what its ranks save for.

    What a process was started to ignore stays ignored: `nohup` means it so.
    """
    named = [signal.Signals[name] for name in environment.read().stop_signals]
    both = dict.fromkeys((*_SIGNALS, *named))
    return [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]


def passed_on(signum: int) -> int:
    """Return what asks the ranks to stop when this stops their launcher.

    A program of several ranks seldom answers the end of a terminal, which it never had; it is
    asked as a scheduler asks it.
    """
    is_known = "SIGTERM" in environment.read().stop_signals
    return signal.SIGTERM if signum == signal.SIGHUP and is_known else signum


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    piped: bool = False,
    pass_fds: Sequence[int] = (),
    listens: bool = True,
) -> Process:
    """Start a process that leads its own session; `piped` hands its output to the caller.

    Without `listens` it has nothing to read: a question ends at once instead of waiting.
    """
    out = subprocess.PIPE if piped else None
    process = subprocess.Popen(
        list(command),
        env=dict(environ),
        stdin=None if listens else subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
        pass_fds=pass_fds,
    )
    _begin_looks(process.pid)
    return process


def poll(process: Process) -> int | None:
    """Return the exit code, None while it runs; and take down what the system says of it."""
    if process.returncode is not None:
        return process.poll()
    _look_at(process.pid)
    if isinstance(process, subprocess.Popen):
        try:
            # Popen would ask for the exit code alone, and only one may ask.
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        except ChildProcessError:
            return process.poll()
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            _note_usage(pid, usage)
    return process.poll()


def first_failure(
    processes: Sequence[Process], interval_s: float = 0.1, timeout_s: float | None = None
) -> int | None:
    """Wait until one fails and return its index, or until all have succeeded and return None.

    Past `timeout_s` it raises TimeoutError.
    """
    began = time.monotonic()
    while timeout_s is None or time.monotonic() - began < timeout_s:
        codes = [poll(process) for process in processes]
        failed = [index for index, code in enumerate(codes) if code]
        if failed:
            return failed[0]
        if all(code == 0 for code in codes):
            return None
        time.sleep(interval_s)
    raise TimeoutError


def end(
    processes: Sequence[Process],
    signum: int,
    grace_s: float,
    is_saving: Callable[[], bool] = lambda: False,
    beats: str | None = None,
) -> None:
    """Send the signal, wait a while, then kill what is left, with everything it started.

    While `is_saving` they may take up to GRACE_S. Being asked to stop once more while waiting
    means: now; unless it comes with the first request, as part of the same wish. What has already
    ended well is left alone, with whatever it has left running on purpose. `beats` is the
    launcher's folder: who has left no word there has not come to our code yet, and an interrupt
    would show what it imports.
    """
    # Called because a stop is on its way up; without one, a signal here is the first of its wish.
    is_final = sys.exception() is not None
    with _one_wish() if is_final else nullcontext():
        concerned = [process for process in processes if poll(process) != 0]
        try:
            _ask(concerned, signum, _loading(concerned, signum, beats))
            _wait(concerned, grace_s)
            if is_saving():
                _wait(concerned, GRACE_S)
        finally:
            if is_final:
                _cut_short.update(each.pid for each in concerned if poll(each) is None)
            for process in concerned:
                _signal_group(process, signal.SIGKILL)
            _wait(concerned, 5.0)


def cut_short() -> frozenset[int]:
    """Return those that were killed after they were asked to stop, since signals were heard."""
    return frozenset(_cut_short)


@contextmanager
def hearing_signals(members: Callable[[], Sequence[Process]]) -> Iterator[None]:
    """Raise Stopped in the block when this process is asked to stop; suspend all as one.

    Only a main thread hears signals; in another thread the block runs without.
    """
    heard: list[float] = []
    _cut_short.clear()

    def stop(signum: int, frame: FrameType | None) -> None:
        heard.append(time.monotonic())
        if len(heard) == 1 or heard[-1] - heard[0] >= _ONE_WISH_S:
            raise Stopped(signum)

    def suspend(signum: int, frame: FrameType | None) -> None:
        _suspend(members())

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    answers = dict.fromkeys(stop_signals(), stop)
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        answers[signal.SIGTSTP] = suspend
    before = {number: signal.signal(number, answer) for number, answer in answers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _suspend(processes: Sequence[Process]) -> None:
    """Stop them and this process, until this one is continued."""
    for process in processes:
        _signal_group(process, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    for process in processes:
        _signal_group(process, signal.SIGCONT)


@contextmanager
def _one_wish() -> Iterator[None]:
    """Let signals pass that come with the one which is being answered; hear later ones as before.

    Whoever else has set handlers, torch's agent or a notebook, would end the wait at once.
    """
    began = time.monotonic()
    before: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}

    def hear(signum: int, frame: FrameType | None) -> None:
        if time.monotonic() - began >= _ONE_WISH_S:
            before[signal.Signals(signum)](signum, frame)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    before[number] = handler
                    signal.signal(number, hear)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ask(processes: Sequence[Process], signum: int, loading: Collection[int]) -> None:
    """Send the signal to those that run, and wake them for it."""
    for process in processes:
        if poll(process) is None:
            # Not its loading workers: it may need a batch more before it can save.
            process.send_signal(signal.SIGTERM if process.pid in loading else signum)
            # A stopped process takes no signal but SIGKILL until it is continued.
            _signal_group(process, signal.SIGCONT)


def _loading(processes: Sequence[Process], signum: int, beats: str | None) -> set[int]:
    """Return those that an interrupt would find importing, before anything of ours."""
    if beats is None or signum != signal.SIGINT:
        return set()
    begun = {pid for _, pid in stack_dumps.known_processes(beats)}
    return {each.pid for each in processes if each.pid not in begun and _is_young(each.pid)}


def _is_young(pid: int) -> bool:
    try:
        return time.time() - psutil.Process(pid).create_time() < _LOADING_S
    except psutil.Error:
        return False


def _signal_group(process: Process, signum: int) -> None:
    try:
        os.killpg(process.pid, signum)
    except (ProcessLookupError, PermissionError):
        return  # the whole group has ended


def _wait(processes: Sequence[Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(poll(process) is not None for process in processes):
            return
        time.sleep(0.02)


class Forked:
    """A fork of this process, as a `Process`.

    It inherits memory, modules and the notebook's variables, and none of the threads, which is
    why one is only made where it is asked for.
    """

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


def start_fork(work: Callable[[], int], environ: Mapping[str, str], piped: bool) -> Forked:
    """Fork a process that leads its own session and exits with what `work` returns."""
    pipes = [os.pipe(), os.pipe()] if piped else []
    outputs = [end for _, end in pipes]

    def run() -> None:
        _begin_fork(environ, outputs, [end for end, _ in pipes])
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


def _begin_fork(environ: Mapping[str, str], outputs: list[int], close: list[int]) -> None:
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


@contextmanager
def launch_folder() -> Iterator[str]:
    """Give a new folder, and leave none behind."""
    _remove_left_folders()
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
    try:
        lock = _lock_folder(Path(folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lock_folder(folder: Path) -> int:
    """Lock the folder; the lock's file gets its name only once it is held."""
    draft = folder / f"{_FOLDER_LOCK}.draft"
    lock = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # a file system without locks: the folder is then never taken for left
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(folder / _FOLDER_LOCK)
    return lock


def _remove_left_folders() -> None:
    """Remove this user's folders whose launcher is gone for certain."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*/{_FOLDER_LOCK}"):
        with suppress(OSError):  # another user's, or another launch removes it just now
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.parent.stat().st_uid == os.getuid():
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a rank left behind, beyond its exit code, its beat and its note."""

    stack: tuple[Frame, ...] = ()
    """The Python stack of a native crash, innermost first."""
    seen: SeenStack | None = None
    """Where the main thread was when it was last looked at."""
    peak_bytes: int | None = None
    """The most memory that it, or a process that it started, was seen to have in use."""
    peers: tuple[tuple[int, int], ...] = ()
    """The same of every rank of this host that is known, with its rank."""
    address_limit_bytes: int | None = None
    """What `ulimit -v` allowed it; None: anything."""
    shared: Space | None = None


@dataclass(slots=True)
class _Looks:
    """What was seen of a process while it ran."""

    peak_bytes: int = 0
    alive_at: float | None = None
    address_limit_bytes: int | None = None
    shared: Space | None = None


_looks: dict[int, _Looks] = {}
"""By process number: what this launcher has seen of its children."""


def _begin_looks(pid: int) -> None:
    """Forget an earlier process that had the same number."""
    _looks[pid] = _Looks()


def _look_at(pid: int) -> None:
    """Take down what the system says of a process that runs; about 0.1 ms."""
    seen = _looks.setdefault(pid, _Looks())
    now = _high_water(pid)
    if now:
        seen.alive_at = time.time()
    seen.peak_bytes = max(seen.peak_bytes, now)
    if sys.platform == "linux":
        with suppress(OSError, ValueError):
            soft = resource.prlimit(pid, resource.RLIMIT_AS)[0]
            seen.address_limit_bytes = None if soft == resource.RLIM_INFINITY else soft
    space = shared_memory()
    if space is not None and (seen.shared is None or space.free_bytes < seen.shared.free_bytes):
        seen.shared = space


def alive_at(pid: int) -> float | None:
    """Return when a process was last seen alive, on the wall clock."""
    seen = _looks.get(pid)
    return None if seen is None else seen.alive_at


def forget_looks(pids: Iterable[int]) -> None:
    """Drop what was seen of processes that are done with."""
    for pid in pids:
        _looks.pop(pid, None)


def _note_usage(pid: int, usage: resource.struct_rusage) -> None:
    """Take down what the kernel says of a process that has ended.

    Its peak is that of the largest of the process and its own children, and counts from before
    the program was loaded, when it was a copy of this process: so it is the child's only where
    it is more than this process ever had.
    """
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if usage.ru_maxrss > own:
        seen = _looks.setdefault(pid, _Looks())
        unit = 1 if sys.platform == "darwin" else 1024
        seen.peak_bytes = max(seen.peak_bytes, usage.ru_maxrss * unit)


def collect_evidence(folder: str | Path, rank: int, pid: int, code: int) -> Evidence:
    """Return what is known of a rank's end."""
    seen = _looks.get(pid, _Looks())
    # A rank that was started again has had several numbers: the latest counts.
    known = {
        other: number for other, number in stack_dumps.known_processes(folder) if number in _looks
    }
    peers = {other: _looks[number].peak_bytes for other, number in known.items()}
    peers[rank] = seen.peak_bytes
    spaces = [space for space in (seen.shared, shared_memory()) if space is not None]
    return Evidence(
        stack=stack_dumps.crash_stack(folder, rank, pid, -code) if code < 0 else (),
        seen=stack_dumps.last_seen(folder, rank, pid),
        peak_bytes=seen.peak_bytes or None,
        peers=tuple((other, peak) for other, peak in sorted(peers.items()) if peak),
        address_limit_bytes=seen.address_limit_bytes,
        shared=min(spaces, key=lambda space: space.free_bytes, default=None),
    )


def _high_water(pid: int) -> int:
    """Return the most memory a process has had in use, as its system counts."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0  # it has ended, and waits to be asked
    except (OSError, ValueError):
        with suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
        return 0
