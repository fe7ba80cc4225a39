"""A script that saves on the main process alone neither hangs nor loses its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from launching import run_command

SCRIPT = Path(__file__).with_name("main_alone.py")


def train(folder: Path, *more: object) -> tuple[str, list[dict[str, Any]]]:
    folder.mkdir()
    words = [sys.executable, "-m", "anytrain", "launch", "--num_processes", "2", "--cpu"]
    ran = run_command([*words, SCRIPT, folder, *more])
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    return ran.stdout + ran.stderr, told


def test_the_main_process_saves_by_itself_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    said, (main, other) = train(tmp_path / "first")
    assert said.count("save_state() was called on the main process alone (rank 1 is at step 3") == 1
    assert main["weights"] == other["weights"]
    assert len(main["seconds"]) == 2 and main["seconds"][1] < 60  # it waits less from then on
    folder = tmp_path / "first/checkpoints"
    manifests = {
        path.name: json.loads((path / "manifest.json").read_text())["world_size"]
        for path in folder.iterdir()
    }
    assert manifests == {"checkpoint_0": 1, "checkpoint_1": 1, "checkpoint_2": 2}
    assert (tmp_path / "first/model/model.safetensors").is_file()
    said, again = train(tmp_path / "second", folder / "checkpoint_0")
    assert "Saved by one process of 2, continued by 2" in said
    for one, two in zip(again, (main, other), strict=True):
        assert one["weights"] == two["weights"]
        assert one["losses"] == two["losses"]
