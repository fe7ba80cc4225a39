"""Call a function in fresh processes, and bring back what rank 0 returns or what went wrong.

Function and arguments travel by value (cloudpickle), so functions of a notebook or of the
script that is running work. Nothing of this process's state is inherited: no fork, no device.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import IO, Any, TextIO

import cloudpickle

from anytrain.core.errors import BadType
from anytrain.machine.processes import crashes, supervise

CALL, OUTCOME = "call.pkl", "outcome-{}.pkl"


@dataclass(frozen=True, slots=True)
class Crew:
    """The processes that one machine brings to a job, and where all of them meet."""

    num_processes: int
    size: int
    first_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables for the children, on top of this process's own."""
    prefix: str | None = None
    """What each output line begins with; ${rank}, ${local_rank} and ${role_name} are filled in."""
    interval_s: float = 0.1
    max_restarts: int = 0

    def variables(self, local_rank: int, folder: str) -> dict[str, str]:
        """Return the environment of one child."""
        return {
            **os.environ,
            **self.environ,
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.num_processes),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "ANYTRAIN_BEATS": folder,
        }


def call(function: Callable[..., Any], args: Sequence[Any], crew: Crew) -> Any:
    """Call the function in each process of the crew; return rank 0's value, if it is here.

    The error of the rank that failed first is raised here, with its type, and with its
    traceback as a note. A Ctrl-C ends the children before it goes on.
    """
    packed = pack(function, args)
    for attempt in range(crew.max_restarts + 1):
        folder = tempfile.mkdtemp(prefix="anytrain-")
        try:
            (Path(folder) / CALL).write_bytes(packed)
            failure = _run(folder, crew)
            if failure is None:
                return _outcome(folder, 0)[1] if crew.first_rank == 0 else None
            if attempt == crew.max_restarts:
                raise failure
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    raise AssertionError("the last attempt returns or raises")


def pack(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Return the call as bytes, or say what in it cannot travel."""
    try:
        inner = cloudpickle.dumps((function, tuple(args)))
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise BadType(
            f"Cannot hand {name} over to other processes.",
            why=f"it, its arguments or something it refers to cannot be pickled: {error}",
            fix="create that object inside the function, or pass what it is made from.",
        ) from error
    # The child must look for modules where this process does before it unpacks the call.
    return pickle.dumps({"path": sys.path, "call": inner})


def _run(folder: str, crew: Crew) -> BaseException | None:
    """Run one attempt; return the error that ended it."""
    before = crashes.memory_marks()
    command = [sys.executable, "-u", "-m", "anytrain.machine.processes.child", folder]
    piped = crew.prefix is not None or not _is_terminal_output(sys.stdout)
    members: list[supervise.Process] = []
    try:
        for local_rank in range(crew.num_processes):
            environ = crew.variables(local_rank, folder)
            members.append(supervise.start(command, environ, piped=piped))
        with _showing_output(members if piped else [], crew):
            failed = supervise.first_failure(members, crew.interval_s)
            if failed is not None:
                supervise.end(members, signal.SIGTERM, supervise.SURVIVOR_GRACE_S)
    except BaseException as stop:
        asked = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM
        supervise.end(members, asked, supervise.GRACE_S)
        raise
    return None if failed is None else _failure(folder, crew, members, failed, before)


def _failure(
    folder: str,
    crew: Crew,
    members: list[supervise.Process],
    first: int,
    before: crashes.MemoryMarks,
) -> BaseException:
    order = [first, *(i for i, m in enumerate(members) if i != first and m.returncode)]
    endings = [
        crashes.ending(folder, crew.first_rank + i, members[i].pid, members[i].returncode)
        for i in order
    ]
    for end in endings:
        error, story = _outcome(folder, end.rank)
        if error is not None:
            error.add_note(f"It was raised by rank {end.rank}:\n{story}")
            return error
    return crashes.explain(endings, crew.size, before, crashes.memory_marks())


def _outcome(folder: str, rank: int) -> tuple[BaseException | None, Any]:
    """Return what a child wrote: no error and its value, or an error and its traceback."""
    path = Path(folder) / OUTCOME.format(rank)
    if not path.exists():
        return None, None
    error, value = pickle.loads(path.read_bytes())
    return error, value


def _is_terminal_output(stream: TextIO) -> bool:
    """Whether children that write to file 1 write where this process's prints go."""
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def _showing_output(members: list[supervise.Process], crew: Crew) -> Iterator[None]:
    """Copy the children's output to this process's, as a notebook needs."""
    threads = []
    for local_rank, member in enumerate(members):
        words = {"rank": crew.first_rank + local_rank, "local_rank": local_rank}
        prefix = Template(crew.prefix or "").safe_substitute(words, role_name="default")
        for pipe, stream in ((member.stdout, sys.stdout), (member.stderr, sys.stderr)):
            if pipe is not None:
                thread = threading.Thread(target=_copy, args=(pipe, stream, prefix), daemon=True)
                thread.start()
                threads.append(thread)
    yield
    for thread in threads:
        # A grandchild may hold the pipe open: what it still says is not waited for.
        thread.join(2.0)


def _copy(pipe: IO[bytes], stream: TextIO, prefix: str) -> None:
    with pipe:
        if prefix:
            for line in pipe:
                stream.write(prefix + line.decode(errors="replace"))
        else:
            # Not by lines: a progress bar ends its lines only when it is done.
            while chunk := os.read(pipe.fileno(), 4096):
                stream.write(chunk.decode(errors="replace"))
                stream.flush()
