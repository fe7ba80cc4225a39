"""The process that runs a script on a claimed device: it may die of it, and nobody else does.

It is started as `python -m anytrain.insight.preflight.child FOLDER`; the request lies in the
folder, and the trace is left there.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
from pathlib import Path

REQUEST = "request.pickle"
RESULT = "trace.pickle"


def main(folder: str) -> None:
    """Run what the folder asks for, leave the trace there, and end without a word."""
    faulthandler.enable()
    target, command, setting = pickle.loads((Path(folder) / REQUEST).read_bytes())
    from anytrain.insight.preflight.script import trace_script

    leave(folder, lambda: trace_script(target, command, setting))


def leave(folder: str, work: object) -> None:
    """Write what the work returns, and end: nothing that waits for an exit may wait here."""
    assert callable(work)
    result = pickle.dumps(work())
    path = Path(folder) / RESULT
    part = path.with_suffix(".part")
    part.write_bytes(result)
    part.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
