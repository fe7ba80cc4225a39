"""The record of a run's time: appended, torn lines left alone, read back life by life."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from anytrain.core import records
from anytrain.core.clock import Ledger
from anytrain.core.errors import BadInput, Notice
from anytrain.core.records import TIMESHEET
from anytrain.engine.recording.timesheet import Timesheet
from launching import run_script


def sheet(folder: Path, ledger: Ledger | None = None, **standing: Any) -> Timesheet:
    return Timesheet(
        folder,
        ledger or Ledger(),
        begin=lambda: {"plan": {"step": {"value": "eager", "because": "default"}}, "step": 0},
        standing=lambda: {"step": 5, **standing},
    )


def test_a_life_is_read_back(tmp_path: Path) -> None:
    ledger = Ledger()
    made = sheet(tmp_path, ledger)
    made.start()
    with ledger.span("step"):
        pass
    made.write()
    (life,) = records.read(tmp_path)
    assert (life.num_steps, life.state) == (5, "running")
    assert life.choice("step") == ("eager", "default")
    assert set(life.seconds) == {"start", "step"}
    made.end("finished")
    made.write()  # an evaluation after it
    (life,) = records.read(tmp_path)
    assert life.state == "finished"


def test_lines_are_few(tmp_path: Path) -> None:
    ledger = Ledger()
    made = sheet(tmp_path, ledger)
    for _ in range(1_000):
        with ledger.span("step"):
            pass
        made.note()
    assert len((tmp_path / TIMESHEET).read_text().splitlines()) == 2, "a begin and a time"


def test_each_start_is_a_life_and_a_torn_line_is_left_alone(tmp_path: Path) -> None:
    sheet(tmp_path).write()
    with (tmp_path / TIMESHEET).open("a") as file:
        file.write('{"kind": "time", "seco')
    moved = [{"choice": "step", "value": "cuda_graph", "because": "8 steps alike", "step": 8}]
    second = sheet(tmp_path, revisions=moved)
    second.write()
    second.write("failed")
    lives = records.read(tmp_path)
    assert [life.state for life in lives] == ["running", "failed"]
    assert lives[1].revisions == moved, "each is written once"
    assert lives[1].choice("step") == ("cuda_graph", "8 steps alike")


def test_a_process_that_is_gone_was_killed(tmp_path: Path) -> None:
    gone = psutil.Popen(["true"])
    gone.wait()
    life = records.Life({"host": socket.gethostname(), "pid": gone.pid, "time": 1e12})
    assert life.state == "killed"


def test_nobody_here_knows_whether_a_process_of_another_host_is_gone() -> None:
    began = {"host": "elsewhere", "pid": os.getpid(), "time": 1e9}
    assert records.Life(began).state == "unknown"
    assert records.Life(began, {"how": "finished"}).state == "finished"
    assert records.Life(began, {"time": 2e9}).heard == 2e9


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        records.read(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=f"no {TIMESHEET}"):
        records.read(tmp_path)
    (tmp_path / TIMESHEET).write_text("{}\nno json\n")
    with pytest.raises(BadInput, match="says nothing yet"):
        records.read(tmp_path)


def test_a_disk_that_fails_is_told_of_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = sheet(tmp_path / "file")
    with pytest.warns(Notice, match="Training goes on"):
        made.write()
    made.write()


def test_a_run_whose_folder_was_removed_ends_without_a_word(tmp_path) -> None:
    told = run_script(
        """
        import shutil, sys
        import torch
        from torch.utils.data import DataLoader
        from anytrain import Accelerator

        accelerator = Accelerator(project_dir=sys.argv[1], cpu=True)
        model, loader = accelerator.prepare(torch.nn.Linear(2, 1), DataLoader(torch.randn(8, 2)))
        for batch in loader:
            accelerator.backward(model(batch).sum())
        accelerator.save_state(sys.argv[1] + "/saved")
        shutil.rmtree(sys.argv[1])
        """,
        tmp_path / "run",
    )
    assert "timesheet" not in told.stderr


def test_a_rank_that_failed_counts_where_the_main_one_never_said_how_it_ended(
    tmp_path: Path,
) -> None:
    child = run_script("import os; print(os.getpid())")
    main, other = (
        sheet(tmp_path),
        Timesheet(tmp_path, Ledger(), begin=dict, standing=lambda: {"step": 3}, rank=2),
    )
    main.start()
    main.write()
    other.start()
    other.end("failed", ValueError("boom"))
    (life,) = records.read(tmp_path)
    assert (life.state, life.end_step, life.error) == ("running", 5, "rank 2: ValueError: boom")
    text = (tmp_path / TIMESHEET).read_text()
    gone = f'"pid": {child.stdout.strip()}'
    (tmp_path / TIMESHEET).write_text(text.replace(f'"pid": {os.getpid()}', gone))
    (life,) = records.read(tmp_path)
    assert life.state == "failed"


def test_an_error_that_tells_of_another_ranks_end_is_no_failure_of_its_own(tmp_path: Path) -> None:
    main, other = (
        sheet(tmp_path),
        Timesheet(tmp_path, Ledger(), begin=dict, standing=lambda: {"step": 3}, rank=1),
    )
    main.start()
    main.write()
    other.start()
    other.end("failed", RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"))
    (life,) = records.read(tmp_path)
    assert (life.failure, life.error) == ({}, None)
