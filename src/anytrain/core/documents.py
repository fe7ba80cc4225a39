"""Read JSON and YAML that others wrote, and the files of a run that is still writing them.

What is wrong with a text is a ValueError of few words: the parsers have errors of their own kinds
for one that nests more deeply than Python's stack, or holds a number of thousands of digits. The
values of a record that may be damaged are taken as they should be, or as nothing.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from anytrain.core.errors import NotAFile

_DEEP = "it is nested too deeply to be read"
_FLOATS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def from_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    >>> from_json('{"steps": [1, 2]}')
    {'steps': [1, 2]}
    """
    return _read(json.loads, text, json.JSONDecodeError)


def from_yaml(text: str) -> Any:
    """Return what a YAML text holds, made of plain values alone."""
    import yaml

    return _read(partial(yaml.load, Loader=_loader()), text, yaml.YAMLError)


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's own, without the integers that Python refuses to write down again."""

        def construct_yaml_int(self, node: Any) -> int:
            value: int = super().construct_yaml_int(node)
            str(value)  # of a hexadecimal one, reading it has no limit
            return value

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    return Loader


def _read(parse: Callable[..., Any], text: str | bytes, error: type[Exception]) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError(_DEEP) from None
    except (error, UnicodeError) as wrong:
        raise ValueError(" ".join(str(wrong).split())) from None
    except ValueError as wrong:
        raise ValueError(_value_words(wrong)) from None
    except (TypeError, OverflowError) as wrong:  # YAML's keys must be values that can be looked up
        raise ValueError(" ".join(str(wrong).split())) from None


def _value_words(error: ValueError) -> str:
    if "integer string conversion" in str(error):
        return f"it holds a number of more than {sys.get_int_max_str_digits()} digits"
    return str(error)


def as_file(path: Path) -> Path:
    """Return the path of a file, or of nothing; refuse what else has the name, unopened."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return path  # whoever opens it hears why
    if stat.S_ISREG(mode):
        return path
    raise NotAFile(
        f"Cannot open {path}.",
        why=f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, and not a file.",
        fix="remove it, or give it another name.",
    )


class Appended:
    """A file of JSON objects, one a line, that somebody else appends to.

    A line that is no object is passed over: a kill has torn it. The last line may still grow, and
    is looked at again next time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._file: tuple[int, int] | None = None

    def new(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file is another one than before, and what it says that is new."""
        try:
            with as_file(self.path).open("rb") as file:
                status = os.fstat(file.fileno())
                which = (status.st_dev, status.st_ino)
                is_other = self._file is not None and which != self._file
                is_other |= status.st_size < self._offset
                self._file, self._offset = which, 0 if is_other else self._offset
                file.seek(self._offset)
                found = file.read()
        except NotAFile:
            raise
        except OSError:
            is_gone, self._file, self._offset = self._file is not None, None, 0
            return is_gone, []
        whole, end, rest = found.rpartition(b"\n")
        entries = _together(whole) or [e for line in whole.split(b"\n") if (e := parse(line))]
        self._offset += len(whole) + len(end)
        if last := parse(rest):  # whole but for its end: half an object never parses
            entries.append(last)
            self._offset += len(rest)
        return is_other, entries


class Replaced:
    """A JSON file that somebody else replaces as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value: dict[str, Any] = {}
        """What it says; nothing where it is missing or damaged."""
        self._seen: tuple[int, int, int] | None = None

    def look(self) -> bool:
        """Read the file if it is another one than before; return whether it was."""
        try:
            status = as_file(self.path).stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen == self._seen:
                return False
            self.value = parse(self.path.read_bytes())
        except NotAFile:
            raise
        except OSError:
            was_there, self._seen, self.value = self._seen is not None, None, {}
            return was_there
        self._seen = seen
        return True


def _together(lines: bytes) -> list[dict[str, Any]]:
    """Return what many lines say, in half the time; nothing where one of them is no object."""
    try:
        found = json.loads(b"[%b]" % lines.replace(b"\n", b","))
    except (ValueError, RecursionError):
        return []
    is_each = len(found) == lines.count(b"\n") + 1 and all(type(one) is dict for one in found)
    return [one for one in found if one] if is_each else []


def parse(line: bytes) -> dict[str, Any]:
    """Return the object that a line holds; nothing where it holds none."""
    try:
        found = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def with_floats(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry whose NaN and infinities, which JSON has no numbers for, are numbers."""
    if not any(type(value) is str for value in entry.values()):
        return entry
    return {
        name: _FLOATS.get(value, value) if isinstance(value, str) else value
        for name, value in entry.items()
    }


# -- the values of a document, as they should be --------------------------------------------------


def mapping(value: Any) -> dict[str, Any]:
    """Return an object; an empty one for anything else."""
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list."""
    return [mapping(each) for each in listed(value) if isinstance(each, dict)]


def listed(value: Any) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return value if isinstance(value, list) else []


def real(value: Any) -> float | None:
    """Return a number, which may be NaN; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def finite(value: Any) -> float | None:
    """Return a number that arithmetic can be done with; None for anything else.

    >>> finite(3), finite(True), finite("3"), finite(float("inf")), finite(10**400)
    (3.0, None, None, None, None)
    """
    found = real(value)
    return found if found is not None and math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """Return a finite number as a whole one; None for anything else."""
    found = finite(value)
    return None if found is None else int(found)
