from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_PROGRAM = "import typer; from anytrain.cli.env import env; typer.run(env)"
without_gpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="torch sees a GPU here")


def _env(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    told = ("ANYTRAIN_", "ACCELERATE_", "RANK", "WORLD_SIZE", "CUDA_VISIBLE")
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(told)}
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *options],
        capture_output=True,
        text=True,
        env={**inherited, **variables},
        timeout=200,
    )


def _facts(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(ran.stdout)
    return facts


def test_every_backend_is_told_with_its_reason_and_the_plan_with_its_reasons() -> None:
    ran = _env(ANYTRAIN_DEVICE="cpu", ANYTRAIN_MIXED_PRECISION="bf16")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    for name in ("tpu", "xla", "cuda", "mps", "cpu"):
        line = next(line for line in lines if line.startswith(f"  {name} "))
        assert len(line.split()) > 2
    assert f"torch         {torch.__version__}" in ran.stdout
    assert "computes in float32, bfloat16, float16, float64" in ran.stdout
    assert "ANYTRAIN_DEVICE" in ran.stdout
    plan = next(line for line in lines if line.startswith("  precision"))
    assert plan.split()[1] == "bf16"
    assert "environment variable ANYTRAIN_MIXED_PRECISION" in plan


def test_a_narrow_pipe_cuts_nothing_off() -> None:
    wide = _env(ANYTRAIN_DEVICE="cpu").stdout
    narrow = _env(ANYTRAIN_DEVICE="cpu", COLUMNS="30").stdout
    assert narrow == wide
    assert "\x1b" not in wide
    assert max(len(line) for line in wide.splitlines()) > 60


def test_json_holds_the_same_facts_in_one_object() -> None:
    facts = _facts(_env("--json", ANYTRAIN_DEVICE="cpu"))
    assert facts["threads"]["because"] == f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    assert [b["name"] for b in facts["backends"]] == ["tpu", "xla", "cuda", "mps", "cpu"]
    assert all(b["because"] for b in facts["backends"])
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["anytrain"]
    assert facts["variables"]["ANYTRAIN_DEVICE"] == "cpu"
    cpu = next(d for d in facts["devices"] if d["backend"] == "cpu")
    assert cpu["memory_bytes"] > 2**20
    assert "float32" in cpu["dtypes"]
    assert facts["plan"]["device"]["value"] == "cpu"
    assert facts["error"] is None


def test_a_refused_plan_is_printed_and_the_exit_status_is_one() -> None:
    ran = _env(ANYTRAIN_DEVICE="cpu", ANYTRAIN_MIXED_PRECISION="fp16")
    assert ran.returncode == 1
    assert "Cannot train in fp16 on 'cpu'" in ran.stdout
    assert "fix:" in ran.stdout
    assert "Traceback" not in ran.stderr


@without_gpu
def test_a_gpu_that_torch_cannot_use_is_shown_as_broken(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "GPU 0: NVIDIA H100 PCIe (UUID: GPU-1)"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    broken = _facts(_env("--json", PATH=path))
    cuda = next(b for b in broken["backends"] if b["name"] == "cuda")
    assert cuda["broken"]
    assert "DeviceBroken" in broken["error"]
    assert "NVIDIA H100 PCIe" in broken["error"]
    assert broken["plan"] == {}
    hidden = _env(PATH=path, CUDA_VISIBLE_DEVICES="")
    assert hidden.returncode == 0
    assert "hidden by CUDA_VISIBLE_DEVICES=''" in hidden.stdout


def test_the_fake_device_is_planned_for_when_named() -> None:
    facts = _facts(_env("--json", ANYTRAIN_DEVICE="fake", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1"))
    assert facts["plan"]["strategy"] == {"value": "ddp", "because": "2 processes over gloo"}


@pytest.mark.gpu
def test_the_gpu_is_shown_with_its_memory_and_dtypes() -> None:
    facts = _facts(_env("--json"))
    gpu = next(d for d in facts["devices"] if d["backend"] == "cuda")
    assert gpu["memory_bytes"] > 2**30
    assert "bfloat16" in gpu["dtypes"]
    assert facts["plan"]["device"]["value"] == "cuda:0"
    assert facts["plan"]["guard"]["value"] == "device"
