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
# HF on the same step: Accelerate 1.15 takes 9 files, 70 calls, 28 switches between files; Trainer
# 5.22 takes 17 files, 166 calls, 80 switches.
BUDGETS = {
    "accelerator": {"files": 5, "functions": 15, "calls": 16, "switches": 7},
    "trainer": {"files": 16, "functions": 52, "calls": 71, "switches": 35},
}


@pytest.fixture(scope="module", params=BUDGETS)
def step(request: pytest.FixtureRequest) -> dict[str, object]:
    told = run_command([sys.executable, TOOL, request.param, "--json"]).stdout
    return {"door": request.param, **json.loads(told.splitlines()[-1])}


def test_a_step_keeps_its_budget(step: dict[str, object]) -> None:
    assert {name: most for name, most in BUDGETS[step["door"]].items() if step[name] > most} == {}


@pytest.mark.skipif(
    not (torch.__version__.startswith("2.13.") and platform.python_version().startswith("3.11.")),
    reason="the step path is frozen for the pinned torch and Python",
)
def test_a_step_takes_the_golden_path(step: dict[str, object]) -> None:
    golden.check(HERE / f"step_path_{step['door']}.txt", step["path"])
