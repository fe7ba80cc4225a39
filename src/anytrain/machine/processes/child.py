"""A fresh child of `spawn`: unpack a call, make it, and bring back its value or its error."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from anytrain.core.errors import BadType, DiskFull
from anytrain.machine.processes import exceptions, notes, parent_death, pickling, stack_dumps
from anytrain.machine.processes.error_hooks import ErrorHooks, is_peer_lost
from anytrain.machine.processes.exceptions import PickledError

Call = tuple[Callable[..., Any], Sequence[Any]]


def main(folder: str, parcel: str, end: str, brings_value: str) -> NoReturn:
    """Make the call that lies in the open file `parcel`, as the rank that the environment says.

    `end` is the number of the child's end of the liveness pipe; `brings_value` is "1" or "0".
    """
    for stream in (sys.stdout, sys.stderr):
        # Whole lines: those of two ranks must not be mixed, whatever PYTHONUNBUFFERED says.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    rank = int(os.environ["RANK"])
    parent_death.exit_with_parent(int(end), folder)

    def unpack() -> Call:
        call: Call = pickling.receive(int(parcel), settles=True)
        os.close(int(parcel))
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return call

    sys.exit(perform(unpack, folder, rank, brings_value == "1"))


def perform(unpack: Callable[[], Call], folder: str, rank: int, brings_value: bool) -> int:
    """Make the call and write down how it went; return the exit code."""
    stack_dumps.dump_stacks(folder, rank)
    try:
        function, args = unpack()
        value = function(*args)
        if brings_value:
            _bring(folder, rank, function, value)
    except SystemExit as leave:
        return _leave(leave, folder, rank)
    except BaseException as error:  # noqa: BLE001  whatever it is, the parent raises it
        return _fail(error, folder, rank)
    return 0


def _bring(folder: str, rank: int, function: Callable[..., Any], value: Any) -> None:
    what = f"Cannot bring back what {getattr(function, '__name__', repr(function))} returned."
    try:
        parcel = pickling.pack(CallResult(None, value))
    except Exception as error:
        raise BadType(
            what,
            why=f"{pickling.culprit_within(value, 'value')} cannot be pickled: {notes.text(error)}",
            fix="return plain values and tensors, or save the object and return its path.",
        ) from error
    try:
        write_result(folder, rank, parcel)
    except OSError as error:
        raise DiskFull(
            what,
            why=f"its {parcel.num_bytes / 2**20:.1f} MiB could not be written to {folder}: {error}",
            fix="make room there, set TMPDIR to a folder on a larger disk, or return less.",
        ) from error


def _fail(error: BaseException, folder: str, rank: int) -> int:
    """Write down the error that ended the call; return the exit code."""
    if isinstance(error, KeyboardInterrupt) and notes.has_flag(folder, notes.INTERRUPTED):
        notes.leave(folder, rank, "interrupt", "")
        return 128 + signal.SIGINT
    is_lost = is_peer_lost(error)
    notes.leave(folder, rank, "peer lost" if is_lost else "error", notes.words(error))
    try:
        result = CallResult(exceptions.pickle_error(error), None)
        write_result(folder, rank, pickling.pack(result))
    except OSError:
        traceback.print_exception(error)  # there is no room even for that
    if is_lost and isinstance(getattr(sys.excepthook, "__self__", None), ErrorHooks):
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _leave(leave: SystemExit, folder: str, rank: int) -> int:
    """Return the exit code of sys.exit(...), which may have been given words."""
    if leave.code is None or leave.code == 0:
        return 0
    notes.leave(folder, rank, "exit", f"sys.exit({leave.code!r})")
    if not isinstance(leave.code, int):
        sys.stderr.write(f"{leave.code}\n")
        return 1
    # The system keeps eight bits of it: 256 would read as success.
    return leave.code & 0xFF or 1


@dataclass(frozen=True, slots=True)
class CallResult:
    """How a rank's call went."""

    error: list[PickledError] | None
    value: Any


def write_result(folder: str, rank: int, parcel: pickling.Parcel) -> None:
    """Write down how it went, whole or not at all; a full disk is an OSError."""
    path = _result_path(folder, rank)
    draft = path.with_suffix(".draft")
    try:
        with draft.open("wb") as file:
            parcel.write(file)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_result(folder: str, rank: int) -> CallResult | None:
    """Return what the rank wrote; tensors in it are on the CPU."""
    path = _result_path(folder, rank)
    if not path.exists():
        return None
    with path.open("rb") as file:
        found: CallResult = pickling.receive(file.fileno())
    return found


def _result_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"outcome-{rank}.pkl"
