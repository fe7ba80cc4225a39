"""A pipe, a socket or a link to a device in a run's folder is named, and never opened."""

from __future__ import annotations

import os
import signal
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anytrain.cli.main import app
from anytrain.core import records
from anytrain.core.errors import NotAFile
from anytrain.engine.checkpoint import Saved, Store
from checkpoints import small_run
from equivalence import twins
from written_runs import write_run

FILES = ["run.json", "timesheet.jsonl", "metrics.jsonl", "events.jsonl", "evaluation-dev.json"]


@pytest.fixture(autouse=True)
def hangs() -> Iterator[None]:
    """Fail a test that waits for somebody to write into a pipe."""

    def fail(number: int, frame: object) -> None:
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's name must be short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(here)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device"])
@pytest.mark.parametrize("name", FILES)
def test_every_command_on_a_run_names_what_is_no_file(tmp_path: Path, name: str, kind: str) -> None:
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    put(run / name, kind)
    commands = [["report", run], ["watch", run], ["watch", run, "--once"], ["watch", run, "--web"]]
    commands += [["diff", other, run]] + ([["why", run]] if name == "timesheet.jsonl" else [])
    for words in commands:
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == 2, (words, done.output)
        assert f"{run / name}" in done.output and f"why: it is {kind}" in done.output


def test_one_that_comes_while_a_run_is_watched_is_named_too(tmp_path: Path) -> None:
    run = records.open_run(write_run(tmp_path / "run"))
    put(run.folder / "events.jsonl", "a named pipe")
    with pytest.raises(NotAFile, match=r"events\.jsonl"):
        run.refresh()


def test_a_report_is_written_over_no_pipe_that_nobody_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    put(run / "report.html", "a named pipe")
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 2 and "report.html" in done.output


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device"])
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "unknown.bin"])
def test_no_command_on_checkpoints_opens_one(tmp_path: Path, name: str, kind: str) -> None:
    assert isinstance(Store(tmp_path).save("checkpoint-1", small_run().snapshot(1)), Saved)
    folder = tmp_path / "checkpoint-1"
    put(folder / name, kind)
    for words in (["list", tmp_path], ["show", folder], ["verify", tmp_path]):
        done = CliRunner().invoke(app, ["checkpoint", *map(str, words)], env={"COLUMNS": "300"})
        known = name in done.output or (name == "unknown.bin" and words[0] != "show")
        assert known and done.exit_code in (0, 1), (words, done.output)


@pytest.mark.parametrize("name", [*FILES[:-1], "all_results.json", "train_results.json"])
def test_a_resumed_run_trains_on_and_says_which_file_it_cannot_write(
    tmp_path: Path, name: str
) -> None:
    def trainer(num_train_epochs: int) -> Any:
        return twins.build(
            twins.OURS,
            tmp_path,
            model=twins.regression(),
            train_dataset=twins.points(16),
            num_train_epochs=num_train_epochs,
            save_strategy="steps",
            save_steps=4,
        )

    trainer(1).train()
    put(tmp_path / name, "a named pipe")
    again = trainer(2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        done = again.train(resume_from_checkpoint=True)
        again.save_metrics("train", done.metrics)
    said = [str(each.message) for each in told if name in str(each.message)]
    assert name == "train_results.json" or any("it is a named pipe" in each for each in said)
    assert again.state.global_step == again.state.max_steps > 0
