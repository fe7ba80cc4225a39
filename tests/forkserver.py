"""Start Python programs in processes that have torch and anytrain imported already.

To import them takes two seconds of a core, and tests start hundreds of processes. One process for
each test worker imports them once, and forks for each program. Such a program has a process, a
session, an environment, a folder and signals of its own; that it finds modules loaded is all that
tells it from one that was started afresh. Import it as `from forkserver import run`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path

PRELOADED = (
    "torch",
    "torch.distributed.run",
    "anytrain.cli.main",
    "anytrain.cli.launch",
    "anytrain.doors.trainer",
    "anytrain.doors.accelerator",
    # What transformers takes longest to import; itself it is left out, as programs ask for it.
    "scipy.optimize",
    "scipy.sparse.linalg",
    "torch._dynamo",
    "torch.distributed.tensor",
)
_READ_AT_START = ("LD_", "PYTHON", "OMP_", "PJRT_", "CUDA_")
"""Variables that are read when a process or a library starts: too late for one that is forked."""
_POLL_S = 0.005


def can_run(env: Mapping[str, str]) -> bool:
    """Whether a program with these variables may be forked: they change nothing read before."""
    named = {name for name in {*env, *os.environ} if name.startswith(_READ_AT_START)}
    named.discard("PYTHONUNBUFFERED")  # a forked program's streams are made anew
    return all(env.get(name) == os.environ.get(name) for name in named)


@dataclass
class Program:
    """A program that runs: its process, and how it ended."""

    connection: socket.socket
    pid: int
    heard: bytes = b""
    status: int | None = field(default=None)

    def poll(self) -> int | None:
        """Return the exit status, less than 0 for a signal; None while it runs."""
        while self.status is None:
            try:
                coming = self.connection.recv(64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            self.heard += coming
            if not coming:  # its keeper was killed too
                self.status = -signal.SIGKILL
            elif self.heard.endswith(b"\n"):
                self.status = int(self.heard)
        return self.status


class Server:
    """The process that forks."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="anytrain-forks-")
        self.address = str(Path(folder, "socket"))
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        atexit.register(self.process.kill)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, out: int, err: int
    ) -> Program:
        """Start what follows `python` in a command; its output goes to the two descriptors."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        asked = json.dumps({"argv": list(argv), "env": dict(env), "cwd": cwd}).encode()
        socket.send_fds(connection, [len(asked).to_bytes(4, "big")], [out, err])
        connection.sendall(asked)
        return Program(connection, int.from_bytes(_exactly(connection, 4), "big"))


_servers: list[Server] = []


def run(
    argvs: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], cwd: str, timeout: float
) -> tuple[list[int] | None, str, str]:
    """Run programs together; return how each ended, or None where they ran past the time.

    A program is what follows `python` in a command: a script, `-m` and a module, `-c` and a text.

    Where one fails, the others are ended, as a launcher does. No process of theirs is left.
    """
    if not _servers:
        _servers.append(Server())
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        streams = (out.fileno(), err.fileno())
        programs = [
            _servers[0].start(argv, env, cwd, *streams)
            for argv, env in zip(argvs, envs, strict=True)
        ]
        codes = _wait(programs, time.monotonic() + timeout)
        for program in programs:
            end_session(program.pid)
            program.connection.close()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return codes, texts[0], texts[1]


def _wait(programs: Sequence[Program], until: float) -> list[int] | None:
    while True:
        codes = [program.poll() for program in programs]
        if any(codes):
            return [code or -signal.SIGTERM for code in codes]
        if None not in codes:
            return [0] * len(codes)
        if time.monotonic() > until:
            return None
        time.sleep(_POLL_S)


def end_session(pid: int) -> None:
    """Kill a process and all that it started: torch's workers lead sessions of their own."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _exactly(connection: socket.socket, size: int) -> bytes:
    held = b""
    while len(held) < size:
        coming = connection.recv(size - len(held))
        if not coming:
            raise EOFError("the process that forks is gone")
        held += coming
    return held


# -- the process that forks ---------------------------------------------------------------------


def _serve(address: str) -> tuple[list[str], dict[str, str]]:
    """Fork for each program; in the forked process return what it is to run."""
    import importlib
    import select

    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # whoever ran the tests is gone
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Start the program as a child, and say how it ended; return in the child alone."""
    size, streams, _, _ = socket.recv_fds(connection, 4, 2)
    asked = json.loads(_exactly(connection, int.from_bytes(size, "big")))
    pid = os.fork()
    if pid == 0:
        _settle(asked["cwd"], streams)
        return asked["argv"], asked["env"]
    for stream in streams:
        os.close(stream)
    connection.sendall(pid.to_bytes(4, "big"))
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):  # nobody waits for a program that ran past its time
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _settle(folder: str, streams: Sequence[int]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, *streams)):
        os.dup2(source, target)
    os.closerange(3, 64)
    os.chdir(folder)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1, closefd=False)  # whole lines, also of several ranks
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _become(argv: list[str], env: dict[str, str]) -> types.CodeType:
    """Make this process the program's own, and return its code."""
    os.environ.clear()
    os.environ.update(env)
    module = types.ModuleType("__main__")
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    if argv[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
        return compile(argv[1], "<string>", "exec")
    if argv[0] == "-m":
        found = _module(argv[1])
        assert found.origin is not None
        sys.argv, sys.path[0] = [found.origin, *argv[2:]], str(Path.cwd())
        module.__spec__, module.__package__ = found, found.parent
        module.__file__ = found.origin
        return compile(Path(found.origin).read_bytes(), found.origin, "exec")
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
    module.__file__ = argv[0]
    return compile(Path(argv[0]).read_bytes(), argv[0], "exec")


def _module(name: str) -> ModuleSpec:
    from importlib.util import find_spec

    found = find_spec(name)
    if found is not None and found.submodule_search_locations is not None:
        found = find_spec(f"{name}.__main__")
    assert found is not None, name
    return found


if __name__ == "__main__":
    _argv, _env = _serve(sys.argv[1])
    # At the top, so that a program that is over ends as every Python program does.
    exec(_become(_argv, _env), sys.modules["__main__"].__dict__)
