"""Trace a run in a process of its own: a device that is not there can end a process.

`python -m anytrain.insight.preflight.trace_process FOLDER` runs the one request that lies in the
folder, and leaves the trace there. Without a folder it is a fork server: it loads torch and what
the run imports once, reads folders from its input, and runs each in a fork. Loading takes many
times as long as tracing, and a search for the largest batch traces often.

What a dead process leaves is an explained failure in the trace, as an error of the script is.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import ENDED, Held, Setting, SourcePlace, Trace, TracedJob

REQUEST = "request.pickle"
RESULT = "trace.pickle"
LOG = "output.txt"
LOADED = "loaded.txt"
# Who sets variables may do so for a module that it imports next: such modules wait for it.
_SETS_VARIABLES = (b"environ", b"putenv", b"dotenv")
# transformers loads by threads, which have no claimed device; dynamo would compile the watching.
TRACE_VARIABLES = {
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "ANYTRAIN_STEP": "eager",
}
_LAST_LINES = 12
# What faulthandler writes when a process is ended from below Python.
_FATAL = "Fatal Python error"
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (\S+)')
_NOT_USERS = ("/torch/", "/anytrain/", "<frozen")


def main(folder: str) -> None:
    """Run what the folder asks for, leave the trace there, and end without a word."""
    faulthandler.enable()
    target, command, setting = pickle.loads((Path(folder) / REQUEST).read_bytes())
    from anytrain.insight.preflight.script import trace_script

    leave_result(folder, lambda: trace_script(target, command, setting))


def leave_result(folder: str, work: Callable[[], Any]) -> None:
    """Write what the work returns, and end: nothing that waits for an exit may wait here."""
    result = pickle.dumps(work())
    path = Path(folder) / RESULT
    part = path.with_suffix(".part")
    part.write_bytes(result)
    part.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_in_fork(folder: str, work: Callable[[], Any]) -> None:
    """Do some work in a fork, all that is said in a file, and never return from it."""
    try:
        with (Path(folder) / LOG).open("wb") as out, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        work()
    finally:
        os._exit(1)


# -- the fork server ----------------------------------------------------------------------------


def serve() -> None:
    """Run each folder that is read in a copy of this process; answer with its exit code."""
    import anytrain.insight.preflight.script  # noqa: F401  what every copy needs

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints while it is loaded is no answer
    # A copy has no thread but the one that made it: with more than one here, it might wait for
    # another for ever.
    while threading.active_count() == 1:
        folder = sys.stdin.buffer.readline().decode().rstrip("\n")
        if not folder:
            return
        child = os.fork()
        if child == 0:
            run_in_fork(folder, partial(_run_in_copy, folder))
        _, status = os.waitpid(child, 0)
        listed = Path(folder) / LOADED  # not there where it died
        names = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
        for name in names:
            with suppress(Exception):  # a copy loads it itself, if it can
                import_module(name)


def _run_in_copy(folder: str) -> None:
    """Run a request; say which modules it had to load."""
    import torch

    from anytrain.insight.preflight.script import trace_script

    faulthandler.enable()
    torch.set_num_threads(1)  # where a pool of threads was begun, its threads are not in the copy
    target, command, setting = pickle.loads((Path(folder) / REQUEST).read_bytes())
    before = set(sys.modules)

    def traced() -> Any:
        trace = trace_script(target, command, setting)
        names = loaded_since(before, command)
        (Path(folder) / LOADED).write_text("\n".join(names), encoding="utf-8")
        return trace

    leave_result(folder, traced)


def loaded_since(before: set[str], command: Sequence[str]) -> list[str]:
    """Return the installed modules that were loaded, in order, as far as they load alike again.

    None does where the user's own code sets variables: what it imports next may read them.
    """
    own, names = [command[0]], []
    for name, module in list(sys.modules.items()):
        file = getattr(getattr(module, "__spec__", None), "origin", None) or ""
        if name in before or not file.endswith((".py", ".so")):
            continue
        if _is_installed(file):
            names.append(name)
        else:
            own.append(file)
    return [] if any(map(_sets_variables, own)) else names


def _is_installed(file: str) -> bool:
    import anytrain

    places = (os.path.dirname(os.__file__), os.path.dirname(anytrain.__file__))
    return "site-packages" in file or "dist-packages" in file or file.startswith(places)


def _sets_variables(file: str) -> bool:
    try:
        text = Path(file).read_bytes()
    except OSError:  # "-m", for one: what the module loads is told apart like all others
        return False
    return any(word in text for word in _SETS_VARIABLES)


# -- its owner ------------------------------------------------------------------------------------


class ForkServer:
    """A process that runs requests in copies of itself, started when it is first needed."""

    def __init__(
        self, variables: Mapping[str, str] = MappingProxyType({}), *, serves: bool = True
    ) -> None:
        # macOS: a copy of a process that has talked to the system's frameworks may be ended.
        self._serves = serves and hasattr(os, "fork") and sys.platform != "darwin"
        # A child gets what this process has, what a launcher would add, and what tracing needs.
        self.variables = {**os.environ, **variables, **TRACE_VARIABLES}  # noqa: TID251  a child's
        self._process: subprocess.Popen[str] | None = None

    def run(self, folder: str) -> int | None:
        """Run the request in a folder; return its exit code, None where nobody could run it."""
        if not self._serves:
            return None
        self._process = self._process or self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{folder}\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())
        except (OSError, ValueError):  # it is gone, or has threads and makes no more copies
            self._serves = False
            return None

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "anytrain.insight.preflight.trace_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self.variables,
            text=True,
            start_new_session=True,  # so that a copy at work can be ended with it
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


# -- one trace ------------------------------------------------------------------------------------


def trace_run(
    target: Target,
    command: Sequence[str],
    setting: Setting | None = None,
    warm: ForkServer | None = None,
) -> Trace:
    """Run a script (or "-m" and a module) with its arguments on the target; return its trace.

    With a fork server it runs in a copy of that one, if it makes copies here.
    """
    warm = warm or ForkServer(serves=False)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / REQUEST).write_bytes(pickle.dumps((target, tuple(command), setting)))
        log = Path(folder) / LOG
        code = warm.run(folder)
        if code is None:
            with log.open("wb") as out:
                code = subprocess.run(
                    [sys.executable, "-m", "anytrain.insight.preflight.trace_process", folder],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=warm.variables,
                    check=False,
                ).returncode
        return _result(folder, code, log)


def trace_call(target: Target, work: Callable[[], Any], setting: Setting | None = None) -> Trace:
    """Do some work of this process on the target, in a copy of the process; return its trace."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            run_in_fork(
                folder, lambda: leave_result(folder, lambda: _trace_here(target, work, setting))
            )
        _, status = os.waitpid(child, 0)
        return _result(folder, os.waitstatus_to_exitcode(status), Path(folder) / LOG)


def _trace_here(target: Target, work: Callable[[], Any], setting: Setting | None) -> Trace:
    import torch

    from anytrain.insight.preflight.script import mps_fallback_is_on_here, trace_here

    os.environ.update(TRACE_VARIABLES)  # noqa: TID251  the copy's own
    torch.set_num_threads(1)  # the pool's threads are not in the copy
    trace = trace_here(target, work, setting)
    return replace(trace, job=replace(trace.job, mps_fallback=mps_fallback_is_on_here()))


def _result(folder: str, code: int, log: Path) -> Trace:
    path = Path(folder) / RESULT
    if path.exists():
        trace: Trace = pickle.loads(path.read_bytes())
        if trace.failure.startswith(ENDED) and trace.failure_place is None:
            return replace(trace, failure=_refused(log) or trace.failure + last_words(log))
        return trace  # an error's own words are all that there is to say
    if code < 0:
        return _failed(f"the tracing process was ended by {signal.Signals(-code).name}", log)
    return _failed(f"the tracing process ended with {code}", log)


def _refused(log: Path) -> str:
    """Return what argparse has said of the script's own options, if that was it."""
    lines = _lines(log)[0]
    if not lines or ": error: " not in lines[-1]:
        return ""
    begin = next((n for n, line in enumerate(lines) if line.startswith("usage: ")), len(lines) - 1)
    usage = " ".join(line.strip() for line in lines[begin:-1])
    return f"{lines[-1]}\n  why: {usage}\n  fix: pass the script's own options after it."


def _failed(what: str, log: Path) -> Trace:
    place = _user_place(_lines(log)[1])
    what += last_words(log)
    return Trace(TracedJob(), (), Held(0, {}, {}, ()), 0.0, failure=what, failure_place=place)


def last_words(log: Path) -> str:
    """Return what a process has said last, as the end of a sentence; it may be nothing."""
    words = "\n".join(_lines(log)[0][-_LAST_LINES:])
    return f"; its last words were:\n{words}" if words else ""


def _lines(log: Path) -> tuple[list[str], list[str]]:
    """Return what a process has said, and the stack that it died with."""
    lines = log.read_text(errors="replace").strip().splitlines()
    end = next((n for n, line in enumerate(lines) if line.startswith(_FATAL)), len(lines))
    return lines[:end], lines[end:]


def _user_place(stack: list[str]) -> SourcePlace | None:
    """Return the innermost line of a dead process's stack that is neither torch's nor ours."""
    for line in stack:
        found = _FRAME.match(line)
        if found and not any(part in found[1] for part in _NOT_USERS):
            number = int(found[2])
            text = linecache.getline(found[1], number).strip()
            return SourcePlace("", found[1], number, found[3], text)
    return None


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) > 1 else serve()
