from __future__ import annotations

import csv
import math
from pathlib import Path

import torch

from anytrain.engine.recording.trackers.files import CSVTracker


def rows(tracker: CSVTracker) -> list[dict[str, str]]:
    with tracker.tracker.open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "_timestamp"} for row in csv.DictReader(file)]


def test_each_log_is_one_row(tmp_path: Path) -> None:
    tracker = CSVTracker("run", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": torch.tensor(0.5), "eval": {"f1": 1}}, step=1)
    tracker.log({"loss": 0.25, "eval": {"f1": 2}}, step=2)
    assert rows(tracker) == [
        {"_step": "1", "loss": "0.5", "eval/f1": "1"},
        {"_step": "2", "loss": "0.25", "eval/f1": "2"},
    ]
    assert (tmp_path / "run" / "config.json").exists()


def test_a_new_name_becomes_a_column_and_no_row_is_lost(tmp_path: Path) -> None:
    tracker = CSVTracker("run", tmp_path)
    tracker.start()
    tracker.log({"loss": 1.0}, step=1)
    tracker.log({"accuracy": 0.5}, step=2)
    tracker.log({"loss": 0.5, "accuracy": 0.75}, step=3)
    assert rows(tracker) == [
        {"_step": "1", "loss": "1.0", "accuracy": ""},
        {"_step": "2", "loss": "", "accuracy": "0.5"},
        {"_step": "3", "loss": "0.5", "accuracy": "0.75"},
    ]


def test_a_run_started_again_keeps_its_columns(tmp_path: Path) -> None:
    for step, values in enumerate([{"a": 1, "b": 2}, {"b": 3}, {"c": 4}]):
        tracker = CSVTracker("run", tmp_path)
        tracker.start()
        tracker.log(values, step=step)
    assert rows(tracker) == [
        {"_step": "0", "a": "1", "b": "2", "c": ""},
        {"_step": "1", "a": "", "b": "3", "c": ""},
        {"_step": "2", "a": "", "b": "", "c": "4"},
    ]


def test_awkward_values_survive_the_format(tmp_path: Path) -> None:
    tracker = CSVTracker("run", tmp_path)
    tracker.start()
    tracker.log({"note": 'a, "b"\nc', "nan": math.nan, "list": [1, 2]})
    (row,) = rows(tracker)
    assert row == {"_step": "", "note": 'a, "b"\nc', "nan": "nan", "list": "[1, 2]"}
