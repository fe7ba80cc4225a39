"""Trace one run for one target, in a process of its own.

A device that is not there can end a process without an exception. What a dead child leaves is an
explained failure in the trace, as an error of the script is.
"""

from __future__ import annotations

import linecache
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anytrain.insight.preflight import fallback
from anytrain.insight.preflight.batches import Setting
from anytrain.insight.preflight.child import LOG, REQUEST, RESULT, be_copy, leave
from anytrain.insight.preflight.findings import SourcePlace
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.traced import ENDED, Held, Job, Trace
from anytrain.insight.preflight.warm import VARIABLES, Warm

_LAST_LINES = 12
# What faulthandler writes when a process is ended from below Python.
_FATAL = "Fatal Python error"
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (\S+)')
_NOT_USERS = ("/torch/", "/anytrain/", "<frozen")


def trace_run(
    target: Target,
    command: Sequence[str],
    setting: Setting | None = None,
    timeout_s: float | None = None,
    warm: Warm | None = None,
) -> Trace:
    """Run a script (or "-m" and a module) with its arguments on the target; return its trace.

    With a warm process it runs in a copy of that one, without a limit of time.
    """
    warm = warm or Warm(serves=False)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / REQUEST).write_bytes(pickle.dumps((target, tuple(command), setting)))
        log = Path(folder) / LOG
        code = warm.run(folder)
        if code is None:
            try:
                code = _run_afresh(folder, log, warm.variables, timeout_s)
            except subprocess.TimeoutExpired:
                return _failed(f"the script had not finished after {timeout_s:.0f} s", log)
        return _result(folder, code, log)


def _run_afresh(
    folder: str, log: Path, variables: Mapping[str, str], timeout_s: float | None
) -> int:
    with log.open("wb") as out:
        return subprocess.run(
            [sys.executable, "-m", "anytrain.insight.preflight.child", folder],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=variables,
            timeout=timeout_s,
            check=False,
        ).returncode


def trace_call(target: Target, work: Callable[[], Any], setting: Setting | None = None) -> Trace:
    """Do some work of this process on the target, in a copy of the process; return its trace."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            be_copy(folder, lambda: leave(folder, lambda: _trace_here(target, work, setting)))
        _, status = os.waitpid(child, 0)
        return _result(folder, os.waitstatus_to_exitcode(status), Path(folder) / LOG)


def _trace_here(target: Target, work: Callable[[], Any], setting: Setting | None) -> Trace:
    import torch

    from anytrain.insight.preflight.script import trace_here

    os.environ.update(VARIABLES)  # noqa: TID251  the copy's own
    torch.set_num_threads(1)  # the pool's threads are not in the copy
    trace = trace_here(target, work, setting)
    return replace(trace, job=replace(trace.job, mps_fallback=fallback.is_on_here()))


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
    """Return an empty trace that says what was said last, and where it ended."""
    place = _user_place(_lines(log)[1])
    what += last_words(log)
    return Trace(Job(), (), Held(0, {}, {}, ()), 0.0, failure=what, failure_place=place)


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
