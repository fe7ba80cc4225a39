"""The other end of `spawn`: unpack a call, make it, and write down how it went."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from anytrain.core.errors import BadType
from anytrain.machine.processes import culprits, faults, handover, leash, notes, outcome
from anytrain.machine.processes.last_words import is_peer_lost

Call = tuple[Callable[..., Any], Sequence[Any]]


def main(folder: str, parcel: str, end: str, brings_value: str) -> NoReturn:
    """Make the call that lies in the open file `parcel`, as the rank that the environment says.

    `end` is the number of the child's end of the leash; `brings_value` is "1" or "0".
    """
    for stream in (sys.stdout, sys.stderr):
        # Whole lines: those of two ranks must not be mixed, whatever PYTHONUNBUFFERED says.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    rank = int(os.environ["RANK"])
    leash.follow(int(end), folder)

    def unpack() -> Call:
        call: Call = handover.receive(int(parcel))
        os.close(int(parcel))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return call

    sys.exit(perform(unpack, folder, rank, brings_value == "1"))


def perform(unpack: Callable[[], Call], folder: str, rank: int, brings_value: bool) -> int:
    """Make the call and write down how it went; return the exit code."""
    faults.watch_faults(folder, rank)
    try:
        function, args = unpack()
        value = function(*args)
        if brings_value:
            _bring(folder, rank, function, value)
    except KeyboardInterrupt:
        notes.leave(folder, rank, "interrupt", "")
        return 128 + signal.SIGINT
    except SystemExit as leave:
        return _code(leave)
    except BaseException as error:  # noqa: BLE001  whatever it is, the parent raises it
        if is_peer_lost(error):
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            notes.leave(folder, rank, "error", f"{type(error).__name__}: {error}")
            outcome.write(folder, rank, outcome.Outcome(outcome.tell(error), None))
        return 1
    return 0


def _bring(folder: str, rank: int, function: Callable[..., Any], value: Any) -> None:
    try:
        outcome.write(folder, rank, outcome.Outcome(None, value))
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise BadType(
            f"Cannot bring back what {name} returned.",
            why=f"{culprits.name_within(value, 'value')} cannot be pickled: {error}",
            fix="return plain values and tensors, or save the object and return its path.",
        ) from error


def _code(leave: SystemExit) -> int:
    """Return the exit code of sys.exit(...), which may have been given words."""
    if leave.code is None or isinstance(leave.code, int):
        return leave.code or 0
    sys.stderr.write(f"{leave.code}\n")
    return 1
