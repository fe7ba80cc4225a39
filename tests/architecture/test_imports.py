"""What is loaded when, and who may know whom."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

from launching import run_command, run_script

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "rich", "typer", "safetensors", "transformers", "accelerate")

IMPORT = """
import json, sys
import anytrain
print(json.dumps({"loaded": sorted(sys.modules)}))
"""
TIMED_IMPORT = """
import importlib, sys, time
start = time.process_time()
importlib.import_module(sys.argv[1])
print(time.process_time() - start)
"""
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""What is compiled once stays so, as where anytrain is installed."""
HELP = """
import json, sys
from anytrain.cli.main import run
sys.argv = ["anytrain", *sys.argv[1:]]
try:
    run()
except SystemExit as exit:
    print(json.dumps({"code": exit.code, "loaded": sorted(sys.modules)}))
"""


def _last_line(text: str) -> dict[str, object]:
    return json.loads(text.splitlines()[-1])


def test_importing_anytrain_loads_nothing_heavy() -> None:
    told = _last_line(run_command([sys.executable, "-c", IMPORT]).stdout)
    assert not set(HEAVY) & set(told["loaded"])


def test_importing_anytrain_is_about_as_quick_as_importing_asyncio() -> None:
    """That is 40 to 80 ms; a fixed number of them would judge the host."""

    def best_s(name: str) -> float:
        command = [sys.executable, "-c", TIMED_IMPORT, name]
        return min(float(run_command(command, env=COMPILED).stdout) for _ in range(5))

    assert best_s("anytrain") < 2 * best_s("asyncio")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["launch", "--help"]])
def test_asking_for_help_loads_no_torch(arguments: list[str]) -> None:
    told = _last_line(run_command([sys.executable, "-c", HELP, *arguments]).stdout)
    assert told["code"] in (0, None)
    assert "torch" not in told["loaded"]


def _imported(body: list[ast.stmt]) -> Iterator[str]:
    """Yield what a module imports as it is imported itself."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (each.name for each in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            yield from (f"{statement.module}.{each.name}" for each in statement.names)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from _imported(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from _imported(getattr(statement, part, []))


def modules_in_cycles() -> list[str]:
    """Return the modules that import each other, a package and what its `__init__` takes too."""
    root = ROOT / "src"
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    graph = networkx.DiGraph()
    for name, path in files.items():
        for found in [*_imported(ast.parse(path.read_text(encoding="utf-8")).body), name]:
            while found:  # a package is imported before what is in it
                if found in files and found != name:
                    graph.add_edge(name, found)
                found = found.rpartition(".")[0]
    parts = networkx.strongly_connected_components(graph)
    return sorted(name for part in parts if len(part) > 1 for name in part)


def test_every_module_can_be_imported_first() -> None:
    """A cycle shows only when its other end is imported first, so each in one gets its own look."""
    script = """
    import importlib, sys
    import torch
    for name in sys.argv[1:]:
        for loaded in [m for m in sys.modules if m.startswith("anytrain")]:
            del sys.modules[loaded]
        importlib.import_module(name)
    print(len(sys.argv[1:]))
    """
    names = modules_in_cycles()
    assert "anytrain.doors.trainer" in names
    assert int(run_script(script, *names, env=COMPILED, timeout=500).stdout) > 10


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources in which mistakes can be planted."""
    copy = tmp_path_factory.mktemp("planted")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def test_a_floor_that_opens_a_door_upward_is_caught(planted: Path) -> None:
    told = _lint_imports(planted, "core/planted_up.py", "import anytrain.engine.rng\n")
    assert told.returncode == 1
    assert "anytrain.core.planted_up -> anytrain.engine.rng" in told.stdout


def test_a_torch_import_before_its_time_is_caught(planted: Path) -> None:
    told = _lint_imports(planted, "machine/processes/planted_torch.py", "import torch\n")
    assert told.returncode == 1
    assert "anytrain.machine.processes.planted_torch -> torch" in told.stdout


def _lint_imports(root: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    path = root / "src" / "anytrain" / name
    path.write_text(text)
    try:
        lint = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
        return run_command(
            lint, cwd=root, env={"PYTHONPATH": str(root / "src"), "COLUMNS": "200"}, check=False
        )
    finally:
        path.unlink()


@pytest.mark.parametrize(
    "line",
    [
        "import torch\n\nDONE = torch.cuda.is_available()\n",
        "import torch\n\nDONE = torch.mps.is_available()\n",
        "import torch.distributed as dist\n\nDONE = dist.is_available()\n",
        "from torch import distributed\n\nDONE = distributed.is_available()\n",
        "import os\n\nHOME = os.environ['HOME']\n",
        "from os import environ\n\nHOME = environ['HOME']\n",
        "import os\n\nHOME = os.getenv('HOME')\n",
    ],
)
def test_a_vendor_word_outside_its_file_is_caught(planted: Path, line: str) -> None:
    path = planted / "src" / "anytrain" / "engine" / "planted_word.py"
    path.write_text(f'"""Say a word that belongs elsewhere."""\n\n{line}')
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--no-cache", path]
    told = run_command(ruff, cwd=planted, check=False)
    path.unlink()
    assert told.returncode == 1
    assert "TID251" in told.stdout


def test_only_the_doors_look_at_the_current_run() -> None:
    """Everybody else is handed the session; a second run in a notebook inherits nothing."""
    readers = {
        str(path.relative_to(ROOT / "src" / "anytrain"))
        for path in (ROOT / "src" / "anytrain").rglob("*.py")
        if re.search(r"assemble(\.current| import .*\bcurrent)\b", path.read_text())
    }
    strangers = [name for name in readers if not name.startswith(("doors/", "engine/assemble/"))]
    assert readers
    assert not strangers
