from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from anytrain.core import records
from anytrain.core.errors import Notice
from anytrain.engine.recording.record import Journal


def entries(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def history(path: Path) -> list[dict[str, Any]]:
    return records.open_run(path.parent).metrics


def test_each_entry_is_one_line_that_is_there_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run" / "metrics.jsonl")
    journal.begin(0)
    journal.write(10, 0.5, {"loss": 0.25, "epoch": 0.5, "note": "warm"})
    (entry,) = entries(journal.path)
    assert entry.pop("time") > 1e9
    assert entry == {"step": 10, "epoch": 0.5, "loss": 0.25, "note": "warm"}


def test_nan_and_infinity_are_valid_json_and_float_reads_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.write(1, None, {"loss": float("nan"), "grad_norm": float("inf")})
    (entry,) = entries(journal.path)
    assert (entry["loss"], entry["grad_norm"]) == ("NaN", "Infinity")
    assert float(entry["grad_norm"]) == float("inf")


def test_resume_drops_what_was_logged_beyond_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Journal(path)
    first.begin(0)
    for step in (10, 20, 30, 40):
        first.write(step, step / 20, {"loss": 1 / step})
    again = Journal(path)
    again.begin(20)
    again.write(30, 1.5, {"loss": 0.5})
    assert [(e["step"], e["loss"]) for e in history(path)] == [(10, 0.1), (20, 0.05), (30, 0.5)]
    assert len(entries(path)) == 6, "nothing is ever taken out of the file"
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_line_torn_by_a_crash_is_passed_over_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "loss": 1.0}\n{"step": 20, "lo')
    journal = Journal(path)
    journal.begin(10)
    journal.write(20, 1.0, {"loss": 0.5})
    assert [entry["step"] for entry in history(path)] == [10, 20]


def test_a_new_training_starts_a_new_history_and_keeps_its_own_baseline(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old = Journal(path)
    old.write(0, 0, {"eval_loss": 9.0})
    old.write(10, 1, {"loss": 9.0})
    new = Journal(path)
    new.write(0, 0, {"eval_loss": 0.7})
    new.begin(0)
    new.write(10, 1, {"loss": 0.6})
    assert [entry.get("eval_loss", entry.get("loss")) for entry in history(path)] == [0.7, 0.6]


def test_a_second_training_of_one_journal_starts_anew_too(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    for loss in (0.5, 0.4):
        journal.begin(0)
        journal.write(10, 1, {"loss": loss})
    assert [entry["loss"] for entry in history(journal.path)] == [0.4]


def test_a_first_training_needs_no_marker(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.write(0, 0, {"eval_loss": 0.7})
    journal.begin(0)
    journal.write(10, 1, {"loss": 0.6})
    assert len(entries(journal.path)) == len(history(journal.path)) == 2


def test_values_by_the_names_of_ours_are_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.write(1, None, {"time": 2.5, "event": "begin", "step": 7})
    (entry,) = history(journal.path)
    assert (entry["step"], entry["time_"], entry["event_"], entry["step_"]) == (1, 2.5, "begin", 7)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", is_main=False)
    journal.begin(0)
    journal.write(1, 0.1, {"loss": 1.0})
    assert not journal.path.exists()


def test_a_disk_that_fails_is_told_of_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    journal = Journal(tmp_path / "file" / "metrics.jsonl")
    journal.begin(0)
    with pytest.warns(Notice, match="Training goes on") as told:
        journal.write(1, 0.1, {"loss": 1.0})
        journal.write(2, 0.2, {"loss": 1.0})
    assert len(told) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_told_of_and_stops_nothing(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    journal = Journal(tmp_path / "metrics.jsonl")
    with pytest.warns(Notice, match="Training goes on"):
        journal.write(1, 0.1, {"loss": 1.0})


def test_a_later_evaluation_of_no_known_step_is_no_part_of_the_history(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Journal(path)
    first.begin(0)
    first.write(10, 1, {"loss": 0.5}, needs_training=True)
    later = Journal(path)
    later.write(0, 0, {"eval_loss": 0.7}, needs_training=True)
    assert entries(path)[-1]["step"] is None
    assert [entry["step"] for entry in history(path)] == [10]
    later.begin(0)
    later.write(10, 1, {"loss": 0.6}, needs_training=True)
    assert [(entry["step"], "event" in entry) for entry in history(path)] == [
        (0, False),
        (10, False),
    ]
