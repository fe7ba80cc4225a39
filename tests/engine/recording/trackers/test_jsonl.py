from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch

from anytrain.engine.recording.trackers.files import JSONLTracker


def test_each_log_is_one_line(tmp_path: Path) -> None:
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "model": {"dtype": torch.float16}})
    tracker.log({"loss": torch.tensor(0.5), "eval": {"hits": np.int64(3)}}, step=1)
    tracker.log({"note": "warm"}, step=2)
    tracker.finish()

    lines = [json.loads(line) for line in tracker.tracker.read_text().splitlines()]
    now = [line.pop("_timestamp") for line in lines]
    assert lines == [{"_step": 1, "loss": 0.5, "eval": {"hits": 3}}, {"_step": 2, "note": "warm"}]
    assert all(abs(time.time() - t) < 60 for t in now)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config == {"lr": 0.1, "model": {"dtype": "torch.float16"}}


def test_a_run_started_again_goes_on_at_the_end(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = JSONLTracker("run", tmp_path)
        tracker.start()
        tracker.log({"loss": 1.0}, step=step)
        tracker.finish()
    lines = tracker.tracker.read_text().splitlines()
    assert [json.loads(line)["_step"] for line in lines] == [1, 2]
