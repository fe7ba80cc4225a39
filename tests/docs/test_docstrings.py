"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
MODULES = [
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SRC.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted > 0
    assert tried.failed == 0
