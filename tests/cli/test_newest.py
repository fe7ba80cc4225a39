"""A command that is given no run takes the newest one below the current folder, and says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anytrain.cli.main import app
from anytrain.engine.checkpoint import Saved, Store
from anytrain.insight.report import run_folders
from checkpoints import small_run
from written_runs import write_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs; the last but one is the newest, the one without a timesheet is newer still."""
    monkeypatch.chdir(tmp_path)
    folders = ["one", "deep/er/two", "deep/three", ".hidden/four", "a/b/c/d/five"]
    for age, name in enumerate(folders):
        run = write_run(tmp_path / name, name.replace("/", "-"))
        for file in run.iterdir():
            os.utime(file, (1000 + age, 1000 + age))
    return tmp_path


def asked(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.mark.parametrize("words", [["why"], ["report"], ["watch", "--once"], ["why", "--json"]])
def test_the_newest_run_is_taken_and_named(here: Path, words: list[str]) -> None:
    done = asked(*words)
    assert done.exit_code == 0, done.output
    assert f"anytrain: taking deep/three: the newest run below {here}." in done.stderr
    assert "taking" not in done.stdout
    assert words != ["report"] or (here / "deep/three/report.html").is_file()


def test_watch_once_takes_the_newest_of_a_folder_of_runs(here: Path) -> None:
    done = asked("watch", "--once", "deep")
    assert done.exit_code == 0, done.output
    assert "anytrain: taking deep/three: the newest run of 2 below deep." in done.stderr
    assert "deep-three:" in done.stdout
    (here / "empty").mkdir()
    assert "There is no record of a run in empty" in asked("watch", "--once", "empty").stderr


def test_the_older_of_the_two_newest_is_what_the_newer_is_held_against(here: Path) -> None:
    done = asked("diff")
    assert done.exit_code == 0
    assert "taking deep/er/two and deep/three: the two newest runs below" in done.stderr
    assert [line[:13] for line in done.stdout.splitlines()[:2]] == [
        "A  deep/er/tw",
        "B  deep/three",
    ]


def test_a_run_is_taken_only_where_it_holds_what_is_read(here: Path) -> None:
    (here / "deep/three/timesheet.jsonl").unlink()
    assert "taking deep/er/two:" in asked("why").stderr
    saved = Store(here / "one").save("checkpoint-1", small_run().snapshot(1))
    assert isinstance(saved, Saved)
    for words in (["list"], ["show"], ["verify"]):
        done = asked("checkpoint", *words)
        assert "taking one:" in done.stderr and "checkpoint-1" in done.stdout


def test_inside_a_run_it_is_that_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here / "one")
    done = asked("why")
    assert done.exit_code == 0 and "taking this folder:" in done.stderr


@pytest.mark.parametrize(
    "words", [["why"], ["report"], ["watch"], ["diff"], ["checkpoint", "list"]]
)
def test_where_there_is_none_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = asked(*words)
    assert done.exit_code == 2
    assert f"There is no run below {tmp_path}." in done.stderr
    assert f"`anytrain {words[0]}" in done.stderr and "Traceback" not in done.output


def test_one_run_is_not_compared_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "only")
    monkeypatch.chdir(tmp_path)
    assert "it is only, and two are needed." in asked("diff").stderr


def test_too_many_folders_are_refused_and_not_half_looked_at(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folders, "_MOST_FOLDERS", 3)
    done = asked("why")
    assert done.exit_code == 2 and "there are more than 3 folders" in done.stderr
