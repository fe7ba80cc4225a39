"""Let an error travel to another process: its class, its words, its lines, what it came from.

Errors are made again without their own `__init__`, whose arguments nobody has kept: a class
may take two and hand one sentence on. What arrives says what was said, or is told in words.
"""

from __future__ import annotations

import io
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from anytrain.machine.processes import notes, pickling

_FIRST_FRAMES, _LAST_FRAMES = 20, 60
FrameLine = tuple[str, str, int, int]
"""A line that an error came through: file, function, the function's first line, the line."""
# An entry of CPython's table of positions: "8 code units, no columns, so many lines further".
_EIGHT_UNITS = 0x80 | 13 << 3 | 7
_OURS = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class PickledError:
    """One error as it travels; others are named by their place in the list of all."""

    pickled: bytes | None
    """What it is made from again; None where its words alone travel."""
    words: str
    notes: list[str]
    frames: list[FrameLine]
    cause: int | None
    context: int | None
    hides_context: bool
    members: list[int]
    """Those of a group."""


def pickle_error(error: BaseException) -> list[PickledError]:
    """Make an error fit to travel, with the errors it came from; it is the first of the list."""
    places = {id(error): 0}
    errors = [error]

    def place(other: BaseException | None) -> int | None:
        if other is None:
            return None
        if id(other) not in places:
            places[id(other)] = len(errors)
            errors.append(other)
        return places[id(other)]

    found = []
    for each in errors:  # the list grows while it is walked
        members = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        found.append(
            PickledError(
                _portable(each),
                notes.words(each),
                [str(note) for note in getattr(each, "__notes__", ())],
                _frames(each),
                place(each.__cause__),
                place(each.__context__),
                each.__suppress_context__,
                [number for member in members if (number := place(member)) is not None],
            )
        )
    return found


def unpickle_error(entries: list[PickledError]) -> BaseException:
    """Return the error with its type, its causes, and a traceback through the child's lines."""
    made: dict[int, BaseException] = {}

    def make(number: int) -> BaseException:
        if number not in made:
            members = [make(member) for member in entries[number].members]
            made[number] = _made_again(entries[number], members)
        return made[number]

    for number, each in enumerate(entries):
        error = make(number)
        error.__cause__ = None if each.cause is None else make(each.cause)
        error.__context__ = None if each.context is None else make(each.context)
        error.__suppress_context__ = each.hides_context
        error.__traceback__ = _traceback(each.frames)
    return made[0]


def _made_again(entry: PickledError, members: list[BaseException]) -> BaseException:
    error: BaseException = RuntimeError(entry.words)
    if entry.pickled is not None:
        try:
            error = _unpickled(entry.pickled, members)
        except Exception:  # noqa: BLE001  its class may be at home in the child alone
            error = RuntimeError(entry.words)
    if entry.notes:
        error.__notes__ = list(entry.notes)
    return error


def _portable(error: BaseException) -> bytes | None:
    """Return a pickle that becomes an error with the same class and text, if there is one."""
    members = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    for dump in _ways(error):
        try:
            pickled = dump()
            again = _unpickled(pickled, members)
            if type(again) is type(error) and notes.text(again) == notes.text(error):
                return pickled
        except Exception:  # noqa: BLE001, S112  any class may have any trouble with its pickling
            continue
    return None


def _ways(error: BaseException) -> Iterator[Callable[[], bytes]]:
    own = type(error).__mro__[: type(error).__mro__.index(_builtin(type(error)))]
    if any(name in vars(kind) for kind in own for name in ("__reduce__", "__reduce_ex__")):
        yield lambda: cloudpickle.dumps(error)
    yield lambda: cloudpickle.dumps(_parts(error))


def _parts(error: BaseException) -> tuple[Any, ...]:
    """Return class, arguments and attributes, without the attributes that cannot travel."""
    _, args, *rest = _builtin(type(error)).__reduce__(error)
    state = rest[0] if rest else {}
    if isinstance(error, BaseExceptionGroup):
        args = args[:1]  # its members travel on their own
    args = tuple(arg if _travels(arg) else repr(arg) for arg in args)
    return type(error), args, {name: thing for name, thing in state.items() if _travels(thing)}


def _unpickled(pickled: bytes, members: list[BaseException]) -> BaseException:
    found: Any = pickling.Unpickler(io.BytesIO(pickled)).load()
    if isinstance(found, BaseException):
        return found
    kind, args, state = found
    if members:
        args = (*args, members)
    base = _builtin(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)
    error.__setstate__(state)
    return error


def _builtin(kind: type[BaseException]) -> Any:
    """Return the class of Python's own that an error's class comes from."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _travels(thing: Any) -> bool:
    try:
        pickling.Unpickler(io.BytesIO(cloudpickle.dumps(thing))).load()
    except Exception:  # noqa: BLE001  any class may have any trouble with its own pickling
        return False
    return True


def _frames(error: BaseException) -> list[FrameLine]:
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


def _traceback(frames: list[FrameLine]) -> types.TracebackType | None:
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
