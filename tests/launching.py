"""Run a script as one process or as several gloo processes, and get what it printed.

Import it as `from launching import launch, run_script`; tests/ is on the path.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import forkserver

# A child must not think that it belongs to the job of whoever runs the tests. Unbuffered, python
# writes a line and its end apart, and the lines of two ranks come out mixed.
_NOT_INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONUNBUFFERED",
)
_WHOLE_LINES = Path(__file__).parent / "whole_lines"
_OURS = ("ANYTRAIN_", "ACCELERATE_", "SLURM_", "TORCHELASTIC_")
_ASKS = "sys.modules"
"""What a program says that asks what is loaded: it begins with nothing imported."""
_ANYTRAIN = "import signal, sys\nfrom anytrain.cli.main import run\n{before}\nrun()\n"
_HANGS_S = 280.0
"""So long a command may take before it is said to hang: torch alone takes 20 s on a busy host."""


def launch(
    script: str,
    nprocs: int,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = _HANGS_S,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run the script's text as `nprocs` CPU processes that torch's launcher might have started."""
    env = env or {}
    if forkserver.can_run(child_environment(env)):
        shared = {
            "WORLD_SIZE": str(nprocs),
            "LOCAL_WORLD_SIZE": str(nprocs),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        ranks = [{**shared, "RANK": str(r), "LOCAL_RANK": str(r), **env} for r in range(nprocs)]
        return _fork(script, args, ranks, timeout, check)
    return torchrun(script, nprocs, *args, env=env, timeout=timeout, check=check)


def torchrun(
    script: str,
    nprocs: int,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = _HANGS_S,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run the script's text under torch's own launcher, with `nprocs` CPU processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nprocs)]
    path = os.pathsep.join(filter(None, [str(_WHOLE_LINES), os.environ.get("PYTHONPATH")]))
    return _run(launcher, script, args, {"PYTHONPATH": path, **(env or {})}, timeout, check)


def run_script(
    script: str,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = _HANGS_S,
    check: bool = True,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run the script's text in one python process; a `fresh` one has imported nothing yet."""
    fresh = fresh or _ASKS in script
    if not fresh and forkserver.can_run(child_environment(env)):
        return _fork(script, args, [env or {}], timeout, check)
    return _run([], script, args, env, timeout, check)


def run_anytrain(
    *words: object, env: Mapping[str, str] | None = None, before: str = "", check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the `anytrain` command in a process that has torch imported; `before` is done first."""
    return run_script(_ANYTRAIN.format(before=before), *words, env=env, check=check)


def run_command(
    command: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = _HANGS_S,
    check: bool = True,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own, and leave none of its processes behind.

    With `check`, a failure raises an AssertionError that shows everything it printed. A Python
    that is `fresh` has imported nothing yet.
    """
    words = [str(word) for word in command]
    if not fresh and _can_be_forked(words, env):
        envs = [child_environment(env)]
        codes, out, err = forkserver.run([words[1:]], envs, str(cwd or Path.cwd()), timeout)
        return _ended(words, codes, out, err, timeout, check)
    process = subprocess.Popen(
        words,
        env=child_environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        forkserver.end_session(process.pid)
        out, err = process.communicate()
        raise AssertionError(_told(words, f"ran past {timeout} s", out, err)) from None
    finally:
        forkserver.end_session(process.pid)
    if check and process.returncode != 0:
        raise AssertionError(_told(words, f"exited {process.returncode}", out, err))
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this environment without any launcher's variables, with one thread a process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith(_OURS)
    }
    return {**kept, "OMP_NUM_THREADS": "1", **(more or {})}


def free_port() -> int:
    """Return a free port that neither the system nor another test gives to anybody else.

    Linux gives away those from 32768 on by itself. A lock, which lasts as long as this process,
    keeps those of the other workers and test runs from the port until somebody listens there.
    """
    while True:
        port = 10_000 + secrets.randbelow(10_000)
        if port in _ports or not _lock(port):
            continue
        _ports.add(port)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


_ports: set[int] = set()
_port_locks: list[int] = []


def _lock(port: int) -> bool:
    """Take the lock of a port for this process: one byte of a file that all of them share."""
    if not _port_locks:
        name = f"anytrain-test-ports-{os.getuid()}"
        path = os.path.join(tempfile.gettempdir(), name)
        _port_locks.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    try:
        fcntl.lockf(_port_locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


@contextmanager
def script_file(text: str) -> Iterator[Path]:
    """Give the path of a script with this text, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="anytrain-test-") as folder:
        path = Path(folder, "script.py")
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        yield path


def _run(
    launcher: list[str],
    script: str,
    args: Sequence[object],
    env: Mapping[str, str] | None,
    timeout: float,
    check: bool,
) -> subprocess.CompletedProcess[str]:
    with script_file(script) as path:
        command = [sys.executable, *launcher, path, *args]
        return run_command(
            command, env=env, cwd=path.parent, timeout=timeout, check=check, fresh=not launcher
        )


def _fork(
    script: str,
    args: Sequence[object],
    envs: Sequence[Mapping[str, str]],
    timeout: float,
    check: bool,
) -> subprocess.CompletedProcess[str]:
    with script_file(script) as path:
        words = [str(path), *map(str, args)]
        whole = [child_environment(env) for env in envs]
        codes, out, err = forkserver.run([words] * len(envs), whole, str(path.parent), timeout)
    return _ended(words, codes, out, err, timeout, check)


def _can_be_forked(words: Sequence[str], env: Mapping[str, str] | None) -> bool:
    """Whether a command is a Python program that may find modules loaded."""
    is_python = words[0] == sys.executable and len(words) > 1
    is_known = is_python and (
        (words[1] == "-c" and _ASKS not in words[2])
        or words[1].endswith(".py")
        or (words[1] == "-m" and words[2].startswith(("anytrain", "torch.distributed.run")))
    )
    return is_known and forkserver.can_run(child_environment(env))


def _ended(
    words: list[str], codes: list[int] | None, out: str, err: str, timeout: float, check: bool
) -> subprocess.CompletedProcess[str]:
    if codes is None:
        raise AssertionError(_told(words, f"ran past {timeout} s", out, err))
    code = next((code for code in codes if code), 0)
    if check and code != 0:
        raise AssertionError(_told(words, f"exited {code}", out, err))
    return subprocess.CompletedProcess(words, code, out, err)


def _told(words: list[str], what: str, out: str, err: str) -> str:
    return f"{' '.join(words)}\n{what}\n--- stdout\n{out}\n--- stderr\n{err}"
