"""Write down what the modules of HF's Trainer import, for `anytrain.compat.transformers`.

    python tools/import_names.py

People import a name from where they have seen it: `get_scheduler` from `transformers.trainer`,
which itself has it from `transformers.optimization`. The import lines of the installed transformers
are read here; none of its modules is run. A test says when the table is out of date
(tests/compat/transformers/test_import_names.py).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from anytrain.compat.transformers import _MODULES

HERE = Path(__file__).parents[1] / "src" / "anytrain" / "compat" / "transformers"
TABLE = HERE / "import_names.json"
_ROOM = "anytrain.compat.transformers"
_ACCELERATE = "anytrain.compat.accelerate"
Origin = list[str | None]
"""A module, and the name there; None where the name is the module itself."""


def table() -> dict[str, dict[str, Origin]]:
    """Return for each of HF's modules the names that it imports, and where each is found here."""
    spec = find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    theirs = Path(spec.submodule_search_locations[0])
    sources = {home: theirs / f"{home}.py" for home in sorted(_MODULES)}
    return {home: imports(path.read_text("utf-8")) for home, path in sources.items()}


def imports(source: str) -> dict[str, Origin]:
    """Return the names that a module's import lines bind."""
    found = {
        name: origin
        for node in _statements(ast.parse(source).body)
        for name, origin in _bound(node)
    }
    return dict(sorted(found.items()))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those that it runs under a condition."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _bound(node: ast.stmt) -> Iterator[tuple[str, Origin]]:
    """Yield the names that an import line binds, each with where it is found here."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, [_here(alias.name if alias.asname else top), None]
    elif isinstance(node, ast.ImportFrom):
        module = ".".join(filter(None, [_ROOM if node.level else "", node.module]))
        for alias in node.names:
            yield alias.asname or alias.name, [_here(module), alias.name]


def _here(module: str) -> str:
    """Return the module that stands here for one of another library."""
    top, dot, rest = module.partition(".")
    return _ACCELERATE + dot + rest if top == "accelerate" else module


def written() -> str:
    """Return the table as its file holds it."""
    lines = []
    for home, names in table().items():
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(o)}" for name, o in names.items())
        lines.append(f"{json.dumps(home)}: {{\n{rows}\n}}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(written(), encoding="utf-8")
