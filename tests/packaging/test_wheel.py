"""The wheel and the sdist, as somebody gets them: core dependencies alone, no checkout."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import run_command

ROOT = Path(__file__).parents[2]
SCRATCH = ROOT / ".wheel-test"
LOCK = ROOT / "requirements-core.lock"
pytestmark = pytest.mark.timeout(900)

SMOKE = """
import importlib.util, json, sys
import anytrain
before = "torch" in sys.modules
from anytrain import Accelerator
print(json.dumps({
    "torch_loaded_by_import": before,
    "file": anytrain.__file__,
    "packages": [n for n in ("accelerate", "lightning", "rich") if importlib.util.find_spec(n)],
    "device": str(Accelerator(cpu=True).device),
}))
"""


@pytest.fixture(scope="module")
def built() -> Iterator[Path]:
    """Build both from the checkout; the wheel is made from the sdist."""
    dist = SCRATCH / "dist"
    SCRATCH.mkdir(exist_ok=True)
    with (SCRATCH / "lock").open("w") as lock:
        # Another test run of this checkout waits here rather than pull the folder away.
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(dist, ignore_errors=True)
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT]
        run_command(build, timeout=300)
        yield dist


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """Give a python that has the wheel and the locked core dependencies, and nothing else."""
    venv, stamp = SCRATCH / "venv", SCRATCH / "core.stamp"
    python = venv / "bin" / "python"
    wanted = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    if not stamp.exists() or stamp.read_text() != wanted or not python.exists():
        shutil.rmtree(venv, ignore_errors=True)
        run_command([sys.executable, "-m", "venv", venv], timeout=300)
        run_command([*pip, "-r", LOCK], timeout=800)
        stamp.write_text(wanted)
    (wheel,) = built.glob("*.whl")
    run_command([*pip, "--no-deps", "--force-reinstall", wheel], timeout=300)
    return python


def test_the_wheel_holds_the_package_and_nothing_beside_it(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"anytrain"}
    assert "anytrain/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_holds_every_file_that_the_sources_hold(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    source = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "anytrain").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert source <= set(zipfile.ZipFile(wheel).namelist()), "a data file is not packaged"


def test_the_sdist_can_be_built_from(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/anytrain/py.typed"} <= names


def test_the_clean_install_imports_and_places_a_run(installed: Path, tmp_path: Path) -> None:
    told = json.loads(run_command([installed, "-c", SMOKE], cwd=tmp_path).stdout)
    assert not told["torch_loaded_by_import"]
    assert told["file"].startswith(os.fspath(SCRATCH))
    assert told["packages"] == ["rich"], "core dependencies, and nothing else"
    assert told["device"] == "cpu"


def test_its_dependencies_agree(installed: Path) -> None:
    run_command([installed, "-m", "pip", "--disable-pip-version-check", "check"])


def test_its_command_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    anytrain = installed.with_name("anytrain")
    version = run_command([anytrain, "--version"], cwd=tmp_path).stdout
    (wheel,) = (SCRATCH / "dist").glob("*.whl")
    assert wheel.name.split("-")[1] in version
    facts = json.loads(run_command([anytrain, "env", "--json"], cwd=tmp_path).stdout)
    assert facts["versions"]["torch"].startswith("2.13.0")
    told = run_command([anytrain, "demo", "--epochs", "1", "--pairs", "640"], cwd=tmp_path).stdout
    assert "Accuracy" in told
    assert (tmp_path / "runs/demo/model.safetensors").exists()
