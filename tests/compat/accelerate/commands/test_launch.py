"""Programs that call `accelerate launch` themselves, as trl's command line does."""

from __future__ import annotations

from pathlib import Path

import pytest

from anytrain.compat.accelerate.commands.config import default_config_file, load_config_from_file
from anytrain.compat.accelerate.commands.launch import launch_command, launch_command_parser
from anytrain.core.errors import Unsupported
from launching import run_script

LAUNCHES = """
import sys
from anytrain.compat.accelerate.commands.launch import launch_command, launch_command_parser

args = launch_command_parser().parse_args(sys.argv[1:])
launch_command(args)
print("back")
"""
WRITES = """
import os, sys
open(sys.argv[2] + os.environ.get("RANK", "0"), "w").write(" ".join(sys.argv[1:2]))
"""


def test_a_script_is_launched_as_the_file_and_the_options_say(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "launch.yaml"
    script.write_text(WRITES)
    file.write_text("num_processes: 2\ndistributed_type: MULTI_GPU\n")
    words = ["--config_file", file, "--cpu", "--same_network", script, "--cpu", tmp_path / "rank"]
    done = run_script(LAUNCHES, *words)
    assert "not used here: same_network" in done.stderr
    assert done.stdout.splitlines()[-1] == "back"
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["--cpu"] * 2


def test_a_script_that_fails_ends_the_program_that_launched_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    done = run_script(LAUNCHES, "--cpu", script, check=False)
    assert done.returncode != 0
    assert "back" not in done.stdout


def test_options_can_be_changed_before_the_launch() -> None:
    args = launch_command_parser().parse_args(["--num-processes=3", "train.py", "--lr", "1"])
    assert (args.num_processes, args.training_script) == (3, "train.py")
    assert args.training_script_args == ["--lr", "1"]
    args.training_script = "nowhere.py"
    with pytest.raises(ValueError, match=r"nowhere\.py"):
        launch_command(args)


def test_engines_that_are_not_here_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="DeepSpeed"):
        launch_command_parser().parse_args(["--use_deepspeed", "train.py"])


@pytest.mark.parametrize("text", ["num_processes: 2\n", '{"num_processes": 2}'])
def test_the_file_of_a_launch_is_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text(text)
    assert load_config_from_file(str(file)).to_dict() == {"num_processes": 2}
    assert Path(default_config_file).name == "default_config.yaml"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_config_from_file(tmp_path / "nowhere.yaml")
