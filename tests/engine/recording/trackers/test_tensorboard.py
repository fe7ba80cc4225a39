from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from anytrain.core.errors import Notice
from anytrain.engine.recording.trackers.tensorboard import TensorBoardTracker

pytest.importorskip("tensorboard")


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0, "images": 0})
    read.Reload()
    return read


@pytest.fixture
def tracker(tmp_path: Path) -> TensorBoardTracker:
    tracker = TensorBoardTracker("run", tmp_path, flush_secs=30)
    tracker.start()
    return tracker


def test_numbers_and_texts_are_read_back(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log({"loss": torch.tensor(0.5), "lr": np.float32(0.25), "note": "warm"}, step=3)
    tracker.log({"loss": 0.25}, step=4)
    tracker.finish()
    read = events(tmp_path / "run")
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [(3, 0.5), (4, 0.25)]
    assert [(e.step, e.value) for e in read.Scalars("lr")] == [(3, 0.25)]
    assert read.Tensors("note/text_summary")[0].tensor_proto.string_val == [b"warm"]


def test_a_group_of_numbers_shares_one_chart(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log({"loss": {"train": torch.tensor(1.0), "eval": 2.0}}, step=1)
    tracker.finish()
    assert events(tmp_path / "run" / "loss_train").Scalars("loss")[0].value == 1.0
    assert events(tmp_path / "run" / "loss_eval").Scalars("loss")[0].value == 2.0


def test_settings_are_stored_in_the_run_itself(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    tracker.store_init_configuration({"lr": 0.5, "model": {"dtype": torch.float16}, "seed": None})
    tracker.finish()
    content = events(tmp_path / "run").PluginTagToContent("hparams")
    start = plugin_data_pb2.HParamsPluginData.FromString(content[metadata.SESSION_START_INFO_TAG])
    stored = start.session_start_info.hparams
    assert stored["lr"].number_value == 0.5
    assert stored["model/dtype"].string_value == "torch.float16"
    assert stored["seed"].string_value == "None"
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert yaml.safe_load((tmp_path / "run" / "hparams.yml").read_text()) == {
        "lr": 0.5,
        "model": {"dtype": "torch.float16"},
        "seed": None,
    }


def test_images_are_read_back(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    tracker.log_images({"array": np.zeros((2, 3, 4, 5), dtype=np.uint8)}, step=1)
    tracker.log_images({"list": [np.zeros((4, 5, 3))] * 2}, step=1, dataformats="NHWC")
    tracker.log_images({"pil": [image.new("L", (5, 4))]}, step=1)
    tracker.finish()
    read = events(tmp_path / "run")
    sizes = {tag: read.Images(tag)[0] for tag in read.Tags()["images"]}
    assert sorted(sizes) == ["array", "list", "pil"]
    assert (sizes["pil"].width, sizes["pil"].height) == (5, 4)


def test_a_value_that_cannot_be_drawn_is_named_once_and_the_rest_recorded(
    tracker: TensorBoardTracker, tmp_path: Path
) -> None:
    with pytest.warns(Notice, match="does not record 'odd'.*is a list") as seen:
        for step in range(3):
            tracker.log({"odd": [1, 2], "loss": 1.0}, step=step)
    tracker.finish()
    assert len(seen) == 1
    assert len(events(tmp_path / "run").Scalars("loss")) == 3
