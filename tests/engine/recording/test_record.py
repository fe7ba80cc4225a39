"""run.json: every start of a run, beside what others keep in it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from anytrain.core import records
from anytrain.core.errors import Notice
from anytrain.engine.recording.record import Record
from anytrain.recipes import folder


def test_each_start_is_added_and_the_newest_is_last(tmp_path: Path) -> None:
    for seed in (1, 2):
        record = Record(tmp_path)
        record.begin({"arguments": {"seed": seed}}, "mine" if seed == 1 else None)
        record.end()
    run = records.open_run(tmp_path)
    assert (run.name, run.record["format"]) == ("mine", records.FORMAT)
    assert [start["arguments"]["seed"] for start in run.starts] == [1, 2]
    start = run.starts[-1]
    assert (start["pid"], start["host"]) == (os.getpid(), socket.gethostname())
    assert {"command", "cwd", "python", "platform", "versions", "git"} <= set(start)
    assert start["versions"]["anytrain"]


def test_a_recipes_settings_stay_in_the_file_and_it_leaves_the_starts_there(tmp_path: Path) -> None:
    settings = {"seed": 1}
    folder.begin(tmp_path, folder.look(tmp_path, settings, overwrite=False), settings)
    record = Record(tmp_path)
    record.begin({})
    record.end()
    assert folder.look(tmp_path, settings, overwrite=False).kind == "continue"
    folder.begin(tmp_path, folder.look(tmp_path, settings, overwrite=False), settings)
    folder.finish(tmp_path)
    found = json.loads((tmp_path / records.RUN).read_text())
    assert (found["state"], found["settings"], len(found["starts"])) == ("finished", settings, 1)


def test_a_run_that_is_restarted_for_ever_keeps_the_newest_starts(tmp_path: Path) -> None:
    starts = [{"pid": number} for number in range(500)]
    (tmp_path / records.RUN).write_text(json.dumps({"starts": starts}))
    record = Record(tmp_path)
    record.begin({})
    record.end()
    found = records.open_run(tmp_path).starts
    assert (len(found), found[0], found[-1]["pid"]) == (200, {"pid": 301}, os.getpid())


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / records.RUN).write_text('{"starts": [{"pid"')
    record = Record(tmp_path)
    record.begin({})
    record.end()
    assert len(records.open_run(tmp_path).starts) == 1


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    record = Record(tmp_path, is_main=False)
    record.begin({})
    record.log(1, 0.1, {"loss": 1.0})
    record.tell("checkpoint", path="x")
    record.end()
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fails_is_told_of_once_for_all_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    record = Record(tmp_path / "file")
    with pytest.warns(Notice, match="Training goes on") as told:
        record.begin({})
        record.log(1, 0.1, {"loss": 1.0})
        record.tell("checkpoint", path="x")
        record.end()
    assert len(told) == 1


class Wordless:
    """A value that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_what_no_file_takes_is_written_in_other_words(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.begin({"odd": Wordless(), "file": "caf\udce9"})
    record.log(1, 0.1, {"odd": Wordless(), "caf\udce9": "caf\udce9"})
    record.tell("checkpoint", path="caf\udce9")
    record.end()
    run = records.open_run(tmp_path)
    assert (run.starts[0]["odd"], run.starts[0]["file"]) == ("<Wordless>", "caf\\udce9")
    assert run.metrics[0]["caf\\udce9"] == "caf\\udce9"
    assert run.events[0]["path"] == "caf\\udce9"


def test_what_cannot_be_described_is_told_of_once(tmp_path: Path) -> None:
    circle: dict[str, object] = {}
    circle["me"] = [circle]

    def facts() -> dict[str, object]:
        raise KeyError("no such thing")

    record = Record(tmp_path)
    with pytest.warns(Notice, match="Cannot describe the run .*KeyError.*Training goes on") as told:
        record.begin(facts)
        record.log(1, 0.1, circle)
        record.log(2, 0.2, {"loss": 1.0})
        record.end()
    assert len(told) == 1
    run = records.open_run(tmp_path)
    assert run.starts[0]["host"] == socket.gethostname()
    assert [entry["step"] for entry in run.metrics] == [2]


def test_a_draft_that_did_not_fit_is_removed(tmp_path: Path) -> None:
    (tmp_path / records.RUN).mkdir()
    record = Record(tmp_path)
    with pytest.warns(Notice, match="Training goes on"):
        record.begin({})
    record.end()
    assert os.listdir(tmp_path) == [records.RUN]


def test_a_fresh_start_in_a_used_folder_begins_its_events_anew(tmp_path: Path) -> None:
    for text, step in (("one", 0), ("two", 0), ("three", 4)):
        record = Record(tmp_path)
        record.begin({}, step=step)
        record.tell("notice", text=text)
        record.end()
    assert [event["text"] for event in records.open_run(tmp_path).events] == ["two", "three"]
