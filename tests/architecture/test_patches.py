"""What of other people's code is replaced is in one table, and nothing else is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from anytrain.core import patches

SRC = Path(__file__).parents[2] / "src" / "anytrain"
# Not for as long as something lasts: where users ask for a setting of torch's by name.
ASKED = {"doors/trainer/outputs.py": {"torch.backends.cudnn"}}
LASTING = {"autocast", "checkpointed blocks"}  # set on a model, and not in a block
_THEIRS = ("torch", "transformers")
_MADE_BY = {"patches.replaced", "patches.counted", "patches.shared"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SRC.rglob("*.py")):
        name = str(path.relative_to(SRC))
        if not name.startswith(("recipes/bench/", "insight/preflight/")):  # in their own processes
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def foreign(tree: ast.Module) -> dict[str, str]:
    """Return what a file calls the modules of torch and transformers."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {own: name for own, name in known.items() if name.split(".")[0] in _THEIRS}


def assigned(tree: ast.Module) -> Iterator[str]:
    """Yield the attributes of torch's and transformers' own modules that a file sets."""
    theirs = foreign(tree)
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute):
                    owner = ast.unparse(part.value)
                    if owner.split(".")[0] in theirs:
                        yield owner
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            owner = ast.unparse(node.args[0])
            if owner.split(".")[0] in theirs:
                yield owner


def test_torch_and_transformers_are_changed_through_the_table_alone() -> None:
    found = {name: set(assigned(tree)) - ASKED.get(name, set()) for name, tree in trees()}
    assert {name: owners for name, owners in found.items() if owners} == {}


def test_every_row_is_made_somewhere_and_no_other() -> None:
    made = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _MADE_BY:
                assert isinstance(node.args[0], ast.Constant)
                made.add(node.args[0].value)
    assert made == set(patches.TABLE) - LASTING


def test_what_a_base_had_is_a_base_s_again() -> None:
    class Base:
        word = "base"

    class Own(Base):
        pass

    with patches.replaced("numbers", Own, word="own"):
        assert (Own.word, patches.in_force()) == ("own", ["numbers"])
    assert "word" not in vars(Own) and patches.in_force() == []
    with pytest.raises(KeyError), patches.replaced("numbers", Base, word="own"):
        raise KeyError
    assert Base.word == "base"


def test_the_last_run_that_shares_a_replacement_undoes_it() -> None:
    done: list[str] = []

    def make() -> object:
        done.append("made")
        return lambda: done.append("undone")

    first, second = (patches.shared("mask values", make) for _ in "ab")  # type: ignore[arg-type]
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert done == ["made"]
    second.__exit__(None, None, None)
    assert done == ["made", "undone"]
    with patches.shared("mask values", lambda: None):
        assert patches.in_force() == []
