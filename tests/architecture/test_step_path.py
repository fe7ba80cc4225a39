"""One optimizer step stays a short walk: a new hop is a visible diff."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
import torch

import golden
from launching import run_command

HERE = Path(__file__).parent
TOOL = HERE.parents[1] / "tools" / "step_path.py"
# HF Accelerate 1.15 on the same step: 9 files, 70 calls, 28 switches.
MOST_FILES = 8
MOST_CALLS = 25


@pytest.fixture(scope="module")
def step() -> dict[str, object]:
    return json.loads(run_command([sys.executable, TOOL, "--json"]).stdout)


def test_a_step_through_accelerator_keeps_its_budget(step: dict[str, object]) -> None:
    assert step["files"] <= MOST_FILES
    assert step["calls"] <= MOST_CALLS


@pytest.mark.skipif(
    not (torch.__version__.startswith("2.13.") and platform.python_version().startswith("3.11.")),
    reason="the step path is frozen for the pinned torch and Python",
)
def test_a_step_through_accelerator_takes_the_golden_path(step: dict[str, object]) -> None:
    golden.check(HERE / "step_path_accelerator.txt", step["path"])
