"""What a run wrote down is read back: torn, damaged, missing or still growing."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from anytrain.core import records
from anytrain.core.errors import BadInput


def write(path: Path, *entries: dict[str, Any]) -> Path:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(entry)}\n" for entry in entries)
    return path


def entry(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "epoch": step / 10, "time": 1e9 + step, **values}


def marker(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "time": 1e9, "event": "begin", **more}


def steps(run: records.RunRecord) -> list[int]:
    return [one["step"] for one in run.metrics]


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        records.open_run(tmp_path / "nowhere")
    with pytest.raises(
        BadInput, match=r"neither timesheet\.jsonl nor metrics\.jsonl nor run\.json"
    ):
        records.open_run(tmp_path)


def test_any_one_file_is_a_record(tmp_path: Path) -> None:
    for number, name in enumerate(
        ("timesheet.jsonl", "metrics.jsonl", "run.json", "events.jsonl", "evaluation-a.json")
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text("")
        run = records.open_run(folder)
        assert (run.name, run.lives, run.starts, run.metrics) == (str(number), [], [], [])
        assert (run.events, run.evaluations, run.state) == ([], {}, "unknown")


def test_a_resumed_life_replaces_what_the_one_before_it_wrote_beyond_its_step(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, marker(0), *(entry(step, loss=1.0) for step in (5, 10, 15)))
    write(path, marker(10), *(entry(step, loss=2.0) for step in (15, 20)))
    run = records.open_run(tmp_path)
    assert [(one["step"], one["loss"]) for one in run.metrics] == [
        (5, 1.0),
        (10, 1.0),
        (15, 2.0),
        (20, 2.0),
    ]


def test_a_training_from_step_0_keeps_only_what_it_wrote_before_it_began(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, marker(0), entry(5), entry(10), entry(0, eval_loss=3.0), marker(0, prelude=1))
    write(path, entry(5))
    assert steps(records.open_run(tmp_path)) == [0, 5]


def test_an_older_log_without_markers_is_one_history(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", entry(5), entry(10), {"step": None, "note": "x"})
    assert steps(records.open_run(tmp_path)) == [5, 10, None]


def test_a_second_evaluation_after_a_training_leaves_its_last_step_as_it_was(
    tmp_path: Path,
) -> None:
    done = entry(10, train_runtime=1.0)
    path = write(tmp_path / "metrics.jsonl", entry(10, eval_f1=0.5, eval_runtime=1.0), done)
    write(path, entry(10, eval_f1=0.25, eval_runtime=1.0), entry(10, test_f1=1.0, test_runtime=1.0))
    run = records.open_run(tmp_path)
    assert [one["eval_f1"] for one in run.metrics if "eval_f1" in one] == [0.5]
    assert [one["test_f1"] for one in run.metrics if "test_f1" in one] == [1.0]
    assert [one["eval_f1"] for one in run.apart] == [0.25]


def test_numbers_that_json_lacks_come_back_as_numbers(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", entry(1, loss="NaN", grad_norm="Infinity", note="NaN?"))
    (found,) = records.open_run(tmp_path).metrics
    assert math.isnan(found["loss"])
    assert (found["grad_norm"], found["note"]) == (math.inf, "NaN?")


def test_a_file_cut_anywhere_gives_its_whole_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", *(entry(step, loss=step / 3) for step in range(20)))
    whole = path.read_bytes()
    for cut in sorted(random.sample(range(len(whole)), 60)):
        path.write_bytes(whole[:cut])
        found = steps(records.open_run(tmp_path))
        num_lines = whole[:cut].count(b"\n")
        assert found in (list(range(num_lines)), list(range(num_lines + 1)))


def test_damage_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'\xff\x00{"step"\n[1]\n{"step": 3}\n' + b"[" * 99_999)
    (tmp_path / "events.jsonl").write_bytes(b'"text"\n{"kind": "notice"}\n')
    (tmp_path / "run.json").write_text('{"name": 7, "starts": [1, {"pid": "x"}], "form')
    (tmp_path / "evaluation.json").write_text("[]")
    write(
        tmp_path / "timesheet.jsonl",
        {"kind": "begin", "pid": "x", "time": "y", "plan": [], "step": "z"},
        {"kind": "time", "seconds": [1], "step": {}, "revisions": [3, {"choice": "a"}]},
    )
    run = records.open_run(tmp_path)
    assert steps(run) == [3]
    assert [one["kind"] for one in run.events] == ["notice"]
    assert (run.starts, run.evaluations) == ([], {})
    (life,) = run.lives
    assert (life.seconds, life.num_steps, life.choice("a")) == ({}, 0, ("", ""))
    assert (life.heard, run.state) == (None, "killed")
    (tmp_path / "run.json").write_text('{"name": 7, "starts": [1, {"pid": "x"}]}')
    assert run.refresh()
    assert (run.name, run.starts) == (tmp_path.name, [{"pid": "x"}])


def test_refresh_reads_what_was_appended_since(tmp_path: Path) -> None:
    log = write(tmp_path / "metrics.jsonl", entry(1))
    run = records.open_run(tmp_path)
    assert not run.refresh()
    with log.open("a") as file:
        file.write('{"step": 2, "lo')
        file.flush()
        assert not run.refresh(), "half a line says nothing yet"
        file.write('ss": 1}\n')
    assert run.refresh()
    assert steps(run) == [1, 2]
    write(tmp_path / "events.jsonl", {"kind": "checkpoint", "step": 2})
    write(tmp_path / "timesheet.jsonl", {"kind": "begin", "pid": os.getpid(), "time": time.time()})
    (tmp_path / "evaluation-b.json").write_text('{"format": 1, "num_samples": 4}')
    (tmp_path / "run.json").write_text('{"name": "mine"}')
    assert run.refresh()
    assert (run.name, len(run.events), run.state) == ("mine", 1, "running")
    assert run.evaluations == {"b": {"format": 1, "num_samples": 4}}


def test_a_file_that_another_run_began_anew_is_read_anew(tmp_path: Path) -> None:
    log = write(tmp_path / "metrics.jsonl", entry(1), entry(2))
    run = records.open_run(tmp_path)
    log.write_text("")
    write(log, entry(1, loss=9.0))
    assert run.refresh()
    assert [one["loss"] for one in run.metrics] == [9.0]
    log.unlink()
    assert run.refresh()
    assert run.metrics == []


def test_a_notice_that_came_often_is_one_event(tmp_path: Path) -> None:
    told = {"kind": "notice", "text": "slow disk", "step": 1}
    write(tmp_path / "events.jsonl", told, {"kind": "removed", "path": "a"}, {**told, "count": 40})
    run = records.open_run(tmp_path)
    assert [one["kind"] for one in run.events] == ["notice", "removed"]
    assert (run.events[0]["count"], run.events[0]["step"]) == (40, 1)


def test_a_run_that_has_only_just_started_again_runs(tmp_path: Path) -> None:
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    write(
        tmp_path / "timesheet.jsonl",
        {"kind": "begin", "time": 1e9, **here},
        {"kind": "end", "time": 1e9 + 1, "how": "failed"},
    )
    run = records.open_run(tmp_path)
    assert run.state == "failed"
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{**here, "time": time.time()}]}))
    run.refresh()
    assert run.state == "running"


def test_all_lines_of_a_life_are_there_for_charts(tmp_path: Path) -> None:
    times = [{"kind": "time", "time": 1e9 + n, "step": n, "seconds": {"step": n}} for n in (1, 2)]
    write(tmp_path / "timesheet.jsonl", {"kind": "begin", "time": 1e9, "step": 0}, *times)
    (life,) = records.open_run(tmp_path).lives
    assert (life.times, life.last, life.num_steps) == (times, times[-1], 2)


def test_an_evaluation_is_found_by_the_name_of_its_set(tmp_path: Path) -> None:
    (tmp_path / records.evaluation_name()).write_text('{"split": "validation"}')
    (tmp_path / records.evaluation_name("mm")).write_text('{"step": 3}')
    assert set(records.open_run(tmp_path).evaluations) == {"validation", "mm"}


def test_a_fresh_start_leaves_the_events_and_evaluations_of_another_run(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", {"kind": "notice", "text": "old", "time": 10})
    (tmp_path / "evaluation-old.json").write_text('{"time": 10, "split": "old"}')
    (tmp_path / "run.json").write_text('{"starts": [{"time": 5, "step": 0, "since": 5}]}')
    run = records.open_run(tmp_path)
    assert ([e["text"] for e in run.events], list(run.evaluations)) == (["old"], ["old"])
    starts = [{"time": 5, "step": 0, "since": 5}, {"time": 20, "step": 0, "since": 15}]
    (tmp_path / "evaluation.json").write_text('{"time": 15}')
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts}))
    write(tmp_path / "events.jsonl", marker(0), {"kind": "notice", "text": "new", "time": 21})
    assert run.refresh()
    assert ([e["text"] for e in run.events], list(run.evaluations)) == (["new"], ["eval"])
    starts.append({"time": 30, "step": 4, "since": 30})
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts}))
    run.refresh()
    assert list(run.evaluations) == ["eval"], "a run that goes on keeps what it found"


HUGE = "1" + "0" * 400


def test_numbers_beyond_all_numbers_raise_nothing(tmp_path: Path) -> None:
    (tmp_path / "timesheet.jsonl").write_text(
        f'{{"kind": "begin", "step": {HUGE}, "pid": 1e400, "time": {HUGE}}}\n'
        f'{{"kind": "time", "step": Infinity, "time": {HUGE}, "seconds": {{"a": {HUGE},"b": 1}}}}\n'
    )
    (tmp_path / "run.json").write_text(f'{{"starts": [{{"time": {HUGE}, "pid": {HUGE}}}]}}')
    (tmp_path / "evaluation.json").write_text(f'{{"time": {HUGE}}}')
    run = records.open_run(tmp_path)
    (life,) = run.lives
    assert (life.num_steps, life.seconds, life.heard) == (0, {"b": 1.0}, None)
    assert (life.state, run.state, list(run.evaluations)) == ("killed", "killed", ["eval"])
