"""What a child brings back: a value, or an error with the lines it came through."""

from __future__ import annotations

import pickle
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from anytrain.machine.processes import handover

_FIRST_FRAMES, _LAST_FRAMES = 20, 60
Place = tuple[str, str, int, int]
"""A line that an error came through: file, function, the function's first line, the line."""
# An entry of CPython's table of positions: "8 code units, no columns, so many lines further".
_EIGHT_UNITS = 0x80 | 13 << 3 | 7
_OURS = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Told:
    """An error as it travels: itself where it can be pickled, its words, its lines, its causes."""

    pickled: bytes | None
    words: str
    frames: list[Place]
    cause: Told | None
    context: Told | None
    hides_context: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank's call went."""

    error: Told | None
    value: Any


def write(folder: str, rank: int, outcome: Outcome) -> None:
    """Write down how it went, whole or not at all; raise what pickle says of the value."""
    parcel = handover.pack(outcome)
    path = _path(folder, rank)
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        parcel.write(file)
    draft.replace(path)


def read(folder: str, rank: int) -> Outcome | None:
    """Return what the rank wrote; tensors in it are on the CPU."""
    try:
        with _path(folder, rank).open("rb") as file:
            found: Outcome = handover.receive(file.fileno())
    except FileNotFoundError:
        return None
    return found


def tell(error: BaseException, seen: frozenset[int] = frozenset()) -> Told:
    """Make an error fit to travel, with the errors it came from."""
    seen |= {id(error)}
    links = [error.__cause__, error.__context__]
    cause, context = (None if e is None or id(e) in seen else tell(e, seen) for e in links)
    return Told(
        _portable(error),
        f"{type(error).__name__}: {error}",
        _frames(error),
        cause,
        context,
        error.__suppress_context__,
    )


def revive(told: Told) -> BaseException:
    """Return the error with its type, its causes, and a traceback through the child's lines."""
    error: BaseException = RuntimeError(told.words)
    if told.pickled is not None:
        try:
            error = pickle.loads(told.pickled)
        except Exception:  # noqa: BLE001  its class may be at home in the child alone
            error = RuntimeError(told.words)
    error.__cause__ = None if told.cause is None else revive(told.cause)
    error.__context__ = None if told.context is None else revive(told.context)
    error.__suppress_context__ = told.hides_context
    return error.with_traceback(_traceback(told.frames))


def _portable(error: BaseException) -> bytes | None:
    try:
        pickled: bytes = cloudpickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001  any class may have any trouble with its own pickling
        return None
    return pickled


def _frames(error: BaseException) -> list[Place]:
    """Return the place of each frame, without ours before the call."""
    walked = [
        (code.co_filename, code.co_qualname, code.co_firstlineno, line or code.co_firstlineno)
        for frame, line in traceback.walk_tb(error.__traceback__)
        for code in (frame.f_code,)
    ]
    while walked and walked[0][0].startswith(_OURS):
        del walked[0]
    if len(walked) > _FIRST_FRAMES + _LAST_FRAMES:  # endless recursion: the middle says nothing
        del walked[_FIRST_FRAMES:-_LAST_FRAMES]
    return walked


def _traceback(frames: list[Place]) -> types.TracebackType | None:
    """Make a traceback out of places: whoever shows it looks the lines up by file and number."""
    found = None
    for place in reversed(frames):
        found = types.TracebackType(found, _frame(*place), 0, place[-1])
    return found


def _frame(file: str, function: str, first: int, line: int) -> types.FrameType:
    """Return a frame that says it is that place: of code that does nothing but raise."""
    code = compile("raise LookupError", file, "exec")
    # Without columns: else whoever shows the line would mark some in it.
    lines = bytes([_EIGHT_UNITS, *_varint(max(0, line - first) << 1)])
    code = code.replace(
        co_name=function.rpartition(".")[2],
        co_qualname=function,
        co_firstlineno=first,
        co_linetable=lines + bytes([_EIGHT_UNITS, 0]) * (len(code.co_code) // 16),
    )
    try:
        exec(code, {"__name__": "anytrain.child"})
    except LookupError as error:
        trace = error.__traceback__
        assert trace is not None and trace.tb_next is not None
        return trace.tb_next.tb_frame
    raise AssertionError("it raises")


def _varint(value: int) -> list[int]:
    """Write a number in groups of six bits, lowest first, as the table of positions does."""
    parts = []
    while value > 63:
        parts.append(0x40 | value & 63)
        value >>= 6
    return [*parts, value]


def _path(folder: str, rank: int) -> Path:
    return Path(folder) / f"outcome-{rank}.pkl"
