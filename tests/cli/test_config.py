from __future__ import annotations

import os
import pty
import subprocess
import sys

import yaml

from anytrain.doors.launch import config
from launching import child_environment, run_command

ANYTRAIN = [sys.executable, "-m", "anytrain", "config"]


def test_options_are_written_where_the_user_says_and_read_back(tmp_path):
    path = tmp_path / "my.yaml"
    words = ["--output", path, "--cpu", "--num-processes", 2, "--mixed_precision", "bf16"]
    ran = run_command([*ANYTRAIN, *words], env={"HOME": str(tmp_path)})
    assert f"anytrain launch --config_file {path}" in ran.stdout
    found = config.read(str(path)).options.given()
    assert found == {"cpu": True, "num_processes": 2, "mixed_precision": "bf16"}
    assert [each.name for each in tmp_path.iterdir()] == ["my.yaml"], "no hidden file anywhere"


def test_the_default_asks_nothing(tmp_path):
    run_command([*ANYTRAIN, "--output", "my.yaml", "--default"], cwd=tmp_path)
    assert yaml.safe_load((tmp_path / "my.yaml").read_text())["num_machines"] == 1


def test_there_is_no_default_place(tmp_path):
    ran = run_command([*ANYTRAIN, "--default"], cwd=tmp_path, check=False)
    assert ran.returncode == 2
    assert "--output" in ran.stderr


def test_without_a_terminal_nothing_is_asked(tmp_path):
    ran = run_command([*ANYTRAIN, "--output", "my.yaml"], cwd=tmp_path, check=False)
    assert ran.returncode == 2
    assert "no terminal to ask at" in ran.stderr


def test_what_cannot_be_launched_is_not_written(tmp_path):
    ran = run_command([*ANYTRAIN, "-o", "my.yaml", "-n", 0], cwd=tmp_path, check=False)
    assert ran.returncode == 2
    assert not list(tmp_path.iterdir())


def test_a_terminal_is_asked(tmp_path):
    ours, theirs = pty.openpty()
    asked = subprocess.Popen(
        [*ANYTRAIN, "--output", "my.yaml"],
        cwd=tmp_path,
        env=child_environment(),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.write(ours, b"2\n1\nnode0\n\nquantum\ncpu\n4\nbf16\n\n")
    out, err = asked.communicate(timeout=240)
    os.close(ours)
    os.close(theirs)
    assert asked.returncode == 0, err
    assert b"Please answer one of auto, cpu, gpu, tpu." in out
    assert config.read(str(tmp_path / "my.yaml")).options.given() == {
        "cpu": True,
        "gradient_accumulation_steps": 1,
        "machine_rank": 1,
        "main_process_ip": "node0",
        "main_process_port": 29500,
        "mixed_precision": "bf16",
        "num_machines": 2,
        "num_processes": 4,
    }
