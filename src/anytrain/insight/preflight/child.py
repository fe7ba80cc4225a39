"""The processes that run a script on a claimed device: one may die of it, and nobody else does.

`python -m anytrain.insight.preflight.child FOLDER` runs the one request that lies in the folder,
and leaves the trace there. Without a folder it stays: it reads folders from its input, and runs
each in a copy of itself that has loaded already what the first one had to load.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

REQUEST = "request.pickle"
RESULT = "trace.pickle"
LOG = "output.txt"
LOADED = "loaded.txt"
# Who sets variables may do so for a module that it imports next: such modules wait for it.
_SETS_VARIABLES = (b"environ", b"putenv", b"dotenv")


def main(folder: str) -> None:
    """Run what the folder asks for, leave the trace there, and end without a word."""
    faulthandler.enable()
    target, command, setting = pickle.loads((Path(folder) / REQUEST).read_bytes())
    from anytrain.insight.preflight.script import trace_script

    leave(folder, lambda: trace_script(target, command, setting))


def leave(folder: str, work: Callable[[], Any]) -> None:
    """Write what the work returns, and end: nothing that waits for an exit may wait here."""
    result = pickle.dumps(work())
    path = Path(folder) / RESULT
    part = path.with_suffix(".part")
    part.write_bytes(result)
    part.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def be_copy(folder: str, work: Callable[[], Any]) -> None:
    """Do some work in a fork, all that is said in a file, and never return from it."""
    try:
        with (Path(folder) / LOG).open("wb") as out, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        work()
    finally:
        os._exit(1)


# -- a process that copies itself ---------------------------------------------------------------


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
            be_copy(folder, partial(_run_and_tell, folder))
        _, status = os.waitpid(child, 0)
        learnt = _told(folder)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
        _load(learnt)


def _run_and_tell(folder: str) -> None:
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

    leave(folder, traced)


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


def _told(folder: str) -> list[str]:
    try:
        return (Path(folder) / LOADED).read_text(encoding="utf-8").splitlines()
    except OSError:  # it died
        return []


def _load(names: Sequence[str]) -> None:
    for name in names:
        try:
            import_module(name)
        except Exception:  # noqa: BLE001  a copy loads it itself, if it can
            continue


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) > 1 else serve()
