"""What a fresh process cannot import is handed over whole."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from anytrain.machine.processes import pickling
from anytrain.machine.processes.spawn import SpawnOptions, call

MODULE = """
import os, sys
import beside

class Kept:
    def __init__(self, value):
        self.value = value

def train():
    return Kept([beside.double(21), sys.argv, os.getcwd(), os.environ["CHANGED"]])
"""


@pytest.fixture
def by_path(tmp_path: Path) -> Iterator[types.ModuleType]:
    """A module that was imported by its path, and one beside it that it imports."""
    loaded = []
    for name, text in (("beside", "def double(x):\n    return 2 * x\n"), ("by_path", MODULE)):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        loaded.append(module)
    yield loaded[-1]
    for module in loaded:
        del sys.modules[module.__name__]


def test_a_function_of_a_module_that_no_child_can_import_is_called_there(
    by_path: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    monkeypatch.setenv("CHANGED", "after the start")
    monkeypatch.chdir(tmp_path / "..")
    found = call(by_path.train, (), SpawnOptions(1, 1))
    assert type(found) is by_path.Kept
    assert found.value == [42, sys.argv, os.getcwd(), "after the start"]
    assert not cloudpickle.list_registry_pickle_by_value()


def test_a_module_that_hides_behind_another_of_its_name_is_not_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    assert pickling.can_import("json")
    monkeypatch.setattr(json, "__file__", str(tmp_path / "json.py"))
    assert not pickling.can_import("json")


@pytest.mark.parametrize(
    "name", ["torch._C._distributed_c10d", "torch.nn.functional", "numpy", "sys", "os", __name__]
)
def test_what_can_be_imported_stays_a_name(name: str) -> None:
    if name != __name__:
        importlib.import_module(name)
    assert pickling.can_import(name)
