"""What needs no torch also runs on the newer Pythons that are here."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from launching import run_command

SRC = Path(__file__).parents[2] / "src"
SCRIPT = """
import compileall, importlib, sys
import anytrain, anytrain.core.environment, anytrain.core.errors, anytrain.core.plan
assert anytrain.core.plan.whole_number(None, "x", 3).value == "3"
files = sys.argv[1:]
for path in files:
    compile(open(path, encoding="utf-8").read(), path, "exec", dont_inherit=True)
print(len(files))
"""


def find(version: str) -> str | None:
    """Return a Python of this version: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = shutil.which(f"python{version}")
    kept = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    return str(kept[-1]) if kept else found


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_every_file_compiles_and_the_core_runs_on(version: str) -> None:
    python = find(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    files = sorted((SRC / "anytrain").rglob("*.py"))
    # PYTHONDONTWRITEBYTECODE: this only looks.
    looked = {"PYTHONPATH": str(SRC), "PYTHONDONTWRITEBYTECODE": "1"}
    told = run_command([python, "-W", "error", "-c", SCRIPT, *files], env=looked).stdout
    assert re.fullmatch(rf"{len(files)}\n", told)
