"""What the modules of HF's Trainer import, read from their source: none of them is run.

People import a name from where they have seen it: `get_scheduler` from `transformers.trainer`,
which itself has it from `transformers.optimization`. Here such a name is taken from where HF's
import line says, with our module wherever there is one. So `Trainer` and `Accelerator` are ours
whichever module they are asked of, and HF's own engine is not loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_ROOM = __name__.rpartition(".")[0]
_ACCELERATE = "anytrain.compat.accelerate"


def find(home: str, name: str) -> Any:
    """Return a name that one of HF's modules imports; AttributeError where it does not."""
    module, inner = _imports(home).get(name, ("", None))
    try:
        found = import_module(module) if module else None
    except ImportError:  # HF imports it under an `if`: torch_xla, SageMaker, an older library
        found = None
    if found is None:
        raise AttributeError(f"module {_ROOM + '.' + home!r} has no attribute {name!r}")
    return found if inner is None else getattr(found, inner)


@cache
def _imports(home: str) -> dict[str, tuple[str, str | None]]:
    """Return for each name that is imported its module, and its name there if it is no module."""
    found = PathFinder.find_spec(f"transformers.{home}", import_module("transformers").__path__)
    if found is None or found.origin is None:
        return {}
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    return {name: origin for node in _statements(tree.body) for name, origin in _bound(node)}


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Give the statements of a module, also those that it runs under a condition."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _bound(node: ast.stmt) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Give the names that an import line binds, each with where it is found here."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, (_here(alias.name if alias.asname else top), None)
    elif isinstance(node, ast.ImportFrom):
        module = ".".join(filter(None, [_ROOM if node.level else "", node.module]))
        for alias in node.names:
            yield alias.asname or alias.name, (_here(module), alias.name)


def _here(module: str) -> str:
    """Return the module that stands here for one of another library."""
    top, dot, rest = module.partition(".")
    return _ACCELERATE + dot + rest if top == "accelerate" else module
