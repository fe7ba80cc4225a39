from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytrain.engine.recording.trackers.wandb import WandBTracker

pytest.importorskip("wandb")


@pytest.fixture
def tracker(tmp_path: Path) -> WandBTracker:
    tracker = WandBTracker("project", mode="offline", dir=str(tmp_path), name="first")
    tracker.start()
    return tracker


def stored(tracker: WandBTracker) -> tuple[Path, list[Any]]:
    """Return the run's folder and the records of its offline file.

    The file is a leveldb log: 7 bytes of head, then 32 KiB blocks of (crc, length, kind, data).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    folder = Path(tracker.tracker.dir).parent
    (file,) = folder.glob("*.wandb")
    data, at, records, part = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(part))
            part = b""
    return folder, records


def history(records: list[Any]) -> list[dict[str, Any]]:
    """Return the logged rows; a nested name is a path of keys."""
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]


def test_values_and_settings_are_stored_offline(tracker: WandBTracker) -> None:
    tracker.store_init_configuration({"lr": 0.1, "model": {"dtype": torch.float16}})
    tracker.log({"loss": torch.tensor(0.5), "hits": np.int64(3)}, step=1)
    tracker.log({"loss": 0.25}, step=2)
    assert dict(tracker.tracker.config)["model"] == {"dtype": "torch.float16"}
    tracker.finish()
    _, records = stored(tracker)
    rows = history(records)
    assert [(r["_step"], r["loss"]) for r in rows] == [(1, 0.5), (2, 0.25)]
    assert rows[0]["hits"] == 3


def test_the_project_may_be_named_in_the_options(tmp_path: Path) -> None:
    tracker = WandBTracker("project", project="other", mode="offline", dir=str(tmp_path))
    tracker.start()
    assert tracker.tracker.project == "other"
    tracker.finish()


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
