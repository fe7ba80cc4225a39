from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offline_wandb
from anytrain.engine.recording.trackers.wandb import WandBTracker

pytest.importorskip("wandb")


@pytest.fixture
def tracker(tmp_path: Path) -> WandBTracker:
    tracker = WandBTracker("project", mode="offline", dir=str(tmp_path), name="first")
    tracker.start()
    return tracker


def stored(tracker: WandBTracker) -> tuple[Path, list[Any]]:
    """Return the run's folder and the records of its offline file."""
    folder = Path(tracker.tracker.dir).parent
    (file,) = folder.glob("*.wandb")
    return folder, offline_wandb.records(file)


def test_values_and_settings_are_stored_offline(tracker: WandBTracker) -> None:
    tracker.store_init_configuration({"lr": 0.1, "model": {"dtype": torch.float16}})
    tracker.log({"loss": torch.tensor(0.5), "hits": np.int64(3)}, step=1)
    tracker.log({"loss": 0.25}, step=2)
    assert dict(tracker.tracker.config)["model"] == {"dtype": "torch.float16"}
    tracker.finish()
    _, records = stored(tracker)
    rows = offline_wandb.history(records)
    assert [(r["_step"], r["loss"]) for r in rows] == [(1, 0.5), (2, 0.25)]
    assert rows[0]["hits"] == 3


def test_the_project_may_be_named_in_the_options(tmp_path: Path) -> None:
    tracker = WandBTracker("project", project="other", mode="offline", dir=str(tmp_path))
    tracker.start()
    assert tracker.tracker.project == "other"
    tracker.finish()


def test_a_run_that_the_user_opened_is_logged_to_and_left_open(tmp_path: Path) -> None:
    import wandb

    with wandb.init(project="mine", mode="offline", dir=str(tmp_path)) as mine:
        tracker = WandBTracker("project", mode="offline", dir=str(tmp_path), name="first")
        tracker.go_on("earlier", step=3)
        tracker.start()
        tracker.log({"loss": 0.5}, step=1)
        tracker.finish()
        mine.log({"after": 1}, step=2)
        assert tracker.tracker is mine
    _, records = stored(tracker)
    assert [r.get("loss", r.get("after")) for r in offline_wandb.history(records)] == [0.5, 1]


def test_images_and_tables_are_stored_offline(tracker: WandBTracker) -> None:
    images = [np.full((4, 5, 3), shade, dtype=np.uint8) for shade in (0, 255)]
    tracker.log_images({"seen": images}, step=1)
    tracker.log_table("rows", columns=["a", "b"], data=[[1, "x"]], step=1)
    tracker.finish()
    folder, _ = stored(tracker)
    assert len(list(folder.glob("files/media/images/seen_*.png"))) == 2
    (table,) = folder.glob("files/media/table/*.table.json")
    read = json.loads(table.read_text())
    assert (read["columns"], read["data"]) == (["a", "b"], [[1, "x"]])
