"""trackio chooses its folder when it is imported, so each test is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trackio")

HEAD = """
import json, sys
import numpy as np, torch
from anytrain.engine.recording.trackers.trackio import TrackioTracker
from trackio.sqlite_storage import SQLiteStorage as Storage
tracker = TrackioTracker("project", name="first", auto_log_cpu=False, auto_log_gpu=False)
tracker.start()
"""
TAIL = """
tracker.finish()
out = {"logs": Storage.get_logs("project", "first"),
       "config": Storage.get_run_config("project", "first")}
json.dump(out, open(sys.argv[1], "w"))
"""


def child(tmp_path: Path, body: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store")}
    command = [sys.executable, "-c", HEAD + body + TAIL, str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(out.read_text())
    return read


def test_values_and_settings_are_read_back(tmp_path: Path) -> None:
    body = """
tracker.store_init_configuration({"lr": 0.1, "model": {"dtype": torch.float16}})
tracker.log({"loss": torch.tensor(0.5), "eval": {"hits": np.int64(3)}}, step=1)
tracker.log({"loss": 0.25}, step=2)
"""
    read = child(tmp_path, body)
    assert [(row["step"], row["loss"]) for row in read["logs"]] == [(1, 0.5), (2, 0.25)]
    assert read["logs"][0]["eval"] == {"hits": 3}
    mine = {k: v for k, v in read["config"].items() if not k.startswith("_")}
    assert mine == {"lr": 0.1, "model": {"dtype": "torch.float16"}}


def test_images_and_tables_are_stored(tmp_path: Path) -> None:
    body = """
tracker.log_images({"seen": [np.zeros((4, 5, 3), dtype=np.uint8)] * 2}, step=1)
tracker.log_table("rows", columns=["a", "b"], data=[[1, "x"]], step=2)
"""
    read = child(tmp_path, body)
    assert [row["image"]["_type"] for row in read["logs"][0]["seen"]["_value"]] == [
        "trackio.image",
        "trackio.image",
    ]
    assert len(list((tmp_path / "store" / "media").rglob("*.png"))) == 2
    assert read["logs"][1]["rows"]["_value"] == [{"a": 1, "b": "x"}]
