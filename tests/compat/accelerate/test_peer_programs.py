"""HF Accelerate's own test programs, as they are installed, run over anytrain unmodified.

`stand_in/` comes first on their path, so that `import accelerate` gives the adapter room.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import accelerate
import pytest

from launching import run_command

STAND_IN = Path(__file__).parent / "stand_in"
PROGRAMS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(folder: Path, words: list[object], env: Mapping[str, str] | None = None) -> str:
    path = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    told: subprocess.CompletedProcess[str] = run_command(
        [sys.executable, *words], env={"PYTHONPATH": path, **(env or {})}, cwd=folder
    )
    return told.stdout


def test_the_stand_in_is_what_they_import(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from accelerate.utils.operations import gather\n"
        "import accelerate.test_utils.testing as testing\n"
        "print(gather.__module__, testing.AcceleratorState.__module__)\n"
    )
    ours = "anytrain.compat.accelerate"
    assert run(tmp_path, [program]).split() == [f"{ours}.utils.operations", f"{ours}.state"]


@pytest.mark.parametrize(
    ("program", "last_words"),
    [
        ("test_script.py", "Test reinstantiated state"),
        ("test_sync.py", "gradient accumulation with optimizer and scheduler"),
        pytest.param("test_ops.py", "sending tensors across devices", marks=pytest.mark.full),
        ("test_distributed_data_loop.py", "sampler as an instance of `BatchSampler`"),
    ],
)
def test_their_program_runs_on_two_processes(program: str, last_words: str, tmp_path: Path) -> None:
    assert last_words in run(tmp_path, [*LAUNCHER, PROGRAMS / program])


@pytest.mark.full
@pytest.mark.parametrize("program", ["test_script.py", "test_sync.py", "test_ops.py"])
def test_their_program_runs_on_one_process(program: str, tmp_path: Path) -> None:
    assert run(tmp_path, [PROGRAMS / program])


ACCUMULATION = """
from itertools import product
from accelerate.test_utils.scripts import test_sync

def main():
    for split, dispatch, each in product([True, False], repeat=3):
        test_sync.test_gradient_accumulation(split, dispatch, each)
        test_sync.test_gradient_accumulation_with_opt_and_scheduler(split, dispatch, each)
    print("all of them")

main()
"""


@pytest.mark.full
def test_their_accumulation_checks_hold_on_two_cpu_processes(tmp_path: Path) -> None:
    """Their program runs these on several GPUs alone."""
    program = tmp_path / "program.py"
    program.write_text(ACCUMULATION)
    assert run(tmp_path, [*LAUNCHER, program]).count("all of them") == 2


METRICS = """
import logging
from accelerate.test_utils.scripts.external_deps import test_metrics

logging.getLogger("accelerate.accelerator")  # where they look for warnings

def main():
    test_metrics.test_gather_for_metrics_with_iterable_dataset()
    test_metrics.test_gather_for_metrics_with_non_tensor_objects_iterable_dataset()
    test_metrics.main()
    print("all of them")

main()
"""
# Imported by their file, and used by its GPU part alone.
DATASETS = """
from types import SimpleNamespace
quiet = SimpleNamespace(set_verbosity_warning=int, set_verbosity_error=int)
utils = SimpleNamespace(logging=quiet)
load_dataset = None
"""


def test_their_metric_checks_hold_on_two_processes(tmp_path: Path) -> None:
    for name, text in {"program": METRICS, "datasets": DATASETS, "evaluate": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    told = run(tmp_path, [*LAUNCHER, tmp_path / "program.py"])
    assert told.count("all of them") == 2
    assert "drop_last" in told


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_their_notebook_checks_hold(num_processes: int, tmp_path: Path) -> None:
    """Two are left out: a queue cannot be handed to a fresh process, and errors are our own."""
    options = ["-q", "-p", "no:cacheprovider", "-k", "not fault_tolerant and not monitoring"]
    told = run(
        tmp_path,
        ["-m", "pytest", *options, PROGRAMS / "test_notebook.py"],
        env={"ACCELERATE_NUM_PROCESSES": str(num_processes)},
    )
    assert f"{1 if num_processes == 1 else 4} passed" in told
