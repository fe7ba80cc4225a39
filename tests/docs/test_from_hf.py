"""The guide for users of HF's libraries is true to the code, name by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import anytrain
from anytrain.cli import main
from anytrain.compat import accelerate
from anytrain.core.errors import Unsupported

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "from-hf.md"


def rows(header: str) -> Iterator[list[str]]:
    """Yield the cells of every table with that first column."""
    for table in GUIDE.read_text(encoding="utf-8").split("\n\n"):
        lines = table.splitlines()
        if lines and lines[0].startswith(f"| {header} |"):
            yield from ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])


def code(cell: str) -> str | None:
    found = re.fullmatch(r"`(.+)`", cell)
    return found and found[1]


def resolve(name: str) -> Any:
    """Return what a dotted name means: a module, or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[end:], module)
    raise AssertionError(f"there is no {name}")


OURS = [cells[1] for cells in rows("HF")]
THEIRS = [name for cells in rows("HF") if (name := code(cells[0]))]
REFUSED = [name for cells in rows("refused") if (name := code(cells[0]))]


@pytest.mark.parametrize("cell", OURS)
def test_what_is_named_as_ours_is_there(cell: str) -> None:
    name = code(cell)
    assert name is not None
    if name.startswith("anytrain "):
        assert name.split()[1] in main._COMMANDS
    elif name.split(".")[0] == "anytrain":
        resolve(name)
    else:
        resolve(f"anytrain.{name}")


@pytest.mark.parametrize("name", THEIRS)
def test_what_is_named_as_theirs_is_there(name: str) -> None:
    pytest.importorskip(name.split(".")[0])
    resolve(name)


@pytest.mark.parametrize("expression", REFUSED)
def test_what_is_said_to_be_refused_is_refused(expression: str) -> None:
    import_module("anytrain.compat.accelerate.tracking")
    names = {
        "__name__": "mine",
        "accelerate": accelerate,
        **{name: getattr(anytrain, name) for name in USED},
    }
    with pytest.raises(Unsupported):
        eval(expression, names)


USED = ("Accelerator", "Trainer", "TrainingArguments")


def test_the_tables_were_found() -> None:
    assert len(OURS) > 60
    assert len(THEIRS) > 50
    assert len(REFUSED) > 10
