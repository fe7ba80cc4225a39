"""What a loop of the user's own leaves in its project's folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anytrain import Accelerator, set_seed
from anytrain.core import records
from anytrain.insight.report.page import how_it_stands
from anytrain.insight.report.watch import ending
from launching import run_command, script_file


def begin(folder: Path | None, **given: Any) -> tuple[Any, ...]:
    set_seed(2)
    accelerator = Accelerator(cpu=True, project_dir=folder, **given)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=4, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def walk(accelerator: Any, model: Any, optimizer: Any, loader: Any, *, first: int = 0) -> None:
    """Train for an epoch, logging a device's tensor at every step."""
    for number, (batch,) in enumerate(loader, first + 1):
        loss = model(batch).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.detach(), "epoch": number / 6}, step=number)


def steps(folder: Path) -> list[int]:
    return [entry["step"] for entry in records.open_run(folder).metrics]


def test_what_is_logged_is_in_the_folder_without_any_tracker(tmp_path: Path) -> None:
    parts = begin(tmp_path)
    parts[0].init_trackers("mine", {"learning_rate": 1e-2, "api_key": "secret"})
    walk(*parts)
    parts[0].end_training()
    run = records.open_run(tmp_path)
    assert (run.name, run.state, steps(tmp_path)) == ("mine", "finished", [1, 2, 3, 4, 5, 6])
    assert isinstance(run.metrics[0]["loss"], float)
    assert run.metrics[2]["epoch"] == 0.5
    (start,) = run.starts
    assert start["arguments"]["learning_rate"] == 1e-2
    assert "api_key" not in start["arguments"]
    assert start["data"]["train"]["num_rows"] == 24
    assert start["data"]["train"]["fingerprint"] is not None
    assert start["model"]["num_parameters"] == 4


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    walk(*begin(None))
    assert list(tmp_path.iterdir()) == []


def test_a_loop_that_goes_on_from_a_checkpoint_has_one_history(tmp_path: Path) -> None:
    first = begin(tmp_path)
    walk(*first)
    first[0].save_state(tmp_path / "saved")
    walk(*first, first=6)
    again = begin(tmp_path)
    again[0].load_state(tmp_path / "saved")
    walk(*again, first=6)
    run = records.open_run(tmp_path)
    assert steps(tmp_path) == list(range(1, 13))
    assert [event["kind"] for event in run.events] == ["checkpoint"]
    assert len(run.starts) == 2


def test_a_new_loop_in_the_same_folder_starts_a_new_history(tmp_path: Path) -> None:
    walk(*begin(tmp_path))
    again = begin(tmp_path)
    again[0].log({"accuracy": 0.5}, step=0)
    walk(*again)
    run = records.open_run(tmp_path)
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert run.metrics[0]["accuracy"] == 0.5


def test_a_later_evaluation_adds_to_the_history(tmp_path: Path) -> None:
    first = begin(tmp_path)
    walk(*first)
    first[0].save_state(tmp_path / "saved")
    later = begin(tmp_path)
    later[0].load_state(tmp_path / "saved")
    for _ in later[3]:
        pass
    later[0].log({"accuracy": 0.75})
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 6]


def test_a_life_that_goes_on_counts_its_own_steps(tmp_path: Path) -> None:
    first = begin(tmp_path)
    walk(*first)
    first[0].save_state(tmp_path / "saved")
    first[0].end_training()
    again = begin(tmp_path)
    again[0].load_state(tmp_path / "saved")
    walk(*again, first=6)
    again[0].end_training()
    run = records.open_run(tmp_path)
    assert [(life.began["step"], life.num_steps) for life in run.lives] == [(0, 6), (6, 6)]
    assert [start["step"] for start in run.starts] == [0, 6]


@pytest.mark.parametrize("logs", [True, False])
def test_a_loop_with_a_loader_of_its_own_has_a_start(tmp_path: Path, logs: bool) -> None:
    accelerator, model, optimizer, _ = begin(tmp_path)
    for _ in range(2):
        accelerator.backward(model(torch.randn(4, 3)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if logs:
            accelerator.log({"loss": 1.0})
    assert records.open_run(tmp_path).state == "running"
    accelerator.end_training()
    run = records.open_run(tmp_path)
    assert (len(run.starts), run.state, steps(tmp_path)) == (1, "ended", [1, 2])


ENDS = """
import os, signal, sys, torch
from anytrain import Accelerator
folder, how, only = sys.argv[1], sys.argv[2], int(sys.argv[3])
accelerator = Accelerator(cpu=True, project_dir=folder)
model = torch.nn.Linear(2, 1)
loader = torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=4)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loader
)
for number, batch in enumerate(loader, 1):
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
    if number == 4 and accelerator.process_index == only:
        if how == "raise":
            raise ValueError("boom with token=abc123secret")
        os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("how", "state", "told"),
    [
        ("raise", "failed", "The run failed at step 4 by ValueError: boom with token="),
        ("stop", "stopped", "The run was stopped at step 4."),
    ],
)
def test_how_a_loop_ended_is_on_record(tmp_path: Path, how: str, state: str, told: str) -> None:
    with script_file(ENDS) as script:
        run_command([sys.executable, script, tmp_path, how, 0], check=False)
    run = records.open_run(tmp_path)
    assert run.state == state
    assert ending(run).startswith(told)
    assert "abc123secret" not in (tmp_path / records.TIMESHEET).read_text()


def test_a_failure_of_another_rank_is_on_record_with_its_error(tmp_path: Path) -> None:
    words = ["-m", "anytrain", "launch", "--num_processes", "2"]
    with script_file(ENDS) as script:
        ran = run_command([sys.executable, *words, script, tmp_path, "raise", 1], check=False)
    assert ran.returncode != 0
    run = records.open_run(tmp_path)
    assert run.state == "failed", ran.stderr
    assert ending(run).startswith("The run failed at step 4 by rank 1: ValueError: boom with")
    assert "The error was: rank 1: ValueError: boom with" in how_it_stands(run)
