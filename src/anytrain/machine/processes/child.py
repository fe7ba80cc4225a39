"""The other end of `spawn`: unpack a call, make it, and write down how it went."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import cloudpickle

from anytrain.machine.processes import notes
from anytrain.machine.processes.last_words import is_peer_lost
from anytrain.machine.processes.spawn import CALL, OUTCOME


def main(folder: str) -> None:
    """Make the call that lies in the folder, as the rank that the environment says."""
    rank = int(os.environ["RANK"])
    try:
        packed = pickle.loads((Path(folder) / CALL).read_bytes())
        sys.path[:] = packed["path"]
        function, args = pickle.loads(packed["call"])
        value = function(*args)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
        value = None
    except BaseException as error:
        if is_peer_lost(error):
            raise
        notes.leave(folder, rank, "error", f"{type(error).__name__}: {error}")
        _write(folder, rank, _portable(error), "".join(traceback.format_exception(error)))
        sys.exit(1)
    if rank == 0:
        _write(folder, rank, None, value)


def _write(folder: str, rank: int, error: BaseException | None, value: Any) -> None:
    """Write the value, or an error and its traceback, whole or not at all."""
    path = Path(folder) / OUTCOME.format(rank)
    draft = path.with_suffix(".draft")
    draft.write_bytes(cloudpickle.dumps((error, value)))
    draft.replace(path)


def _portable(error: BaseException) -> BaseException:
    """Return the error, or another one in its place if it cannot travel."""
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001  any class may have any trouble with its own pickling
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main(sys.argv[1])
