"""A script is found behind whatever would start it."""

from __future__ import annotations

from pathlib import Path

import pytest

from anytrain.cli.preflight import read_command
from anytrain.core.errors import BadInput

TRAIN = ["train.py", "--lr", "1", "-m"]


@pytest.mark.parametrize(
    ("before", "number"),
    [
        ([], None),
        (["python3", "-m", "torch.distributed.run", "--nproc-per-node", "4"], 4),
        (["/usr/bin/python"], None),
        (["torchrun", "--standalone", "--nnodes=1:2", "--nproc_per_node=4"], 8),
        (["anytrain", "launch"], None),
        (["anytrain", "launch", "-n", "2", "--cpu"], 2),
        (["accelerate", "launch", "--num_processes", "2"], 2),
    ],
)
def test_the_script_and_the_number_of_processes_are_found(
    before: list[str], number: int | None
) -> None:
    found = read_command([*before, *TRAIN])
    assert (found.command, found.options.num_processes) == (TRAIN, number)


@pytest.mark.parametrize("before", [["torchrun"], ["anytrain", "launch"], ["python"], []])
def test_a_module_is_found(before: list[str]) -> None:
    words = [*before, "-m", "my.train", "--lr", "1"]
    assert read_command(words).command == ["-m", "my.train", "--lr", "1"]


def test_what_the_launcher_tells_the_script_is_kept_but_for_the_device() -> None:
    found = read_command(["anytrain", "launch", "--mixed_precision", "bf16", "--cpu", "train.py"])
    assert found.variables == {"ANYTRAIN_LAUNCH_PRECISION": "bf16"}


def test_the_launchers_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("num_processes: 3\n")
    found = read_command(["anytrain", "launch", "--config_file", str(file), "train.py"])
    assert found.options.num_processes == 3


@pytest.mark.parametrize("words", [["torchrun", "--standalone"], ["python"]])
def test_a_launcher_without_a_script_is_refused(words: list[str]) -> None:
    with pytest.raises(BadInput, match="no script"):
        read_command(words)


def test_a_number_that_depends_on_the_machine_is_refused() -> None:
    with pytest.raises(BadInput, match="nproc_per_node=gpu"):
        read_command(["torchrun", "--nproc_per_node", "gpu", "train.py"])
