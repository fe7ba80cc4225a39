"""`anytrain why` on real runs, as a person meets it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anytrain.cli.main import app
from anytrain.core.records import open_run
from anytrain.insight.report.watch import RunView, SilentDisplay
from anytrain.insight.report.web import told as told_by_the_page
from launching import child_environment, run_command, script_file
from written_runs import write_run

ENDLESS = """
import sys, time
import torch
from anytrain import Trainer, TrainingArguments

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.005)
        return {"x": torch.full((4,), index / 64.0), "labels": torch.tensor(index % 2)}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

settings = TrainingArguments(
    output_dir=sys.argv[1], report_to="none", use_cpu=True, max_steps=100_000, save_strategy="no"
)
Trainer(Model(), settings, train_dataset=Slow()).train()
"""
OWN_LOOP = """
import sys, time
import torch
from anytrain import Accelerator

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=4)
model, optimizer, data, test = accelerator.prepare(model, optimizer, data, data)
began = time.perf_counter()
for epoch in range(2):
    for batch in data:
        time.sleep(0.01)
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    for batch in test:
        with torch.no_grad():
            model(batch)
        time.sleep(0.15)
accelerator.save_state(sys.argv[1] + "/saved")
print(time.perf_counter() - began)
"""
WHY = [sys.executable, "-m", "anytrain", "why"]


def why(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(run_command([*WHY, folder, "--json"]).stdout)
    assert sum(told["shares"].values()) == pytest.approx(1, abs=0.02)
    return told


def test_a_killed_run_still_answers(tmp_path: Path) -> None:
    with script_file(ENDLESS) as script:
        process = subprocess.Popen(
            [sys.executable, script, tmp_path],
            env=child_environment(),
            stdout=subprocess.DEVNULL,
        )
        try:
            until = time.monotonic() + 240
            record = tmp_path / "timesheet.jsonl"
            while not record.exists() or len(record.read_text().splitlines()) < 4:
                assert time.monotonic() < until
                time.sleep(0.05)
            assert why(tmp_path)["state"] == "running"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    told = why(tmp_path)
    assert told["state"] == "killed"
    assert told["steps"] > 0
    assert told["finding"]["name"] == "data"


def test_of_a_run_on_another_host_it_is_told_when_it_was_last_heard_of(tmp_path: Path) -> None:
    lines = (
        {"kind": "begin", "host": "node-7", "pid": 1, "time": 1e9},
        {"kind": "time", "time": 1e9 + 60, "step": 5, "seconds": {"step": 1.0}},
    )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "timesheet.jsonl").write_text(text)
    told = why(tmp_path)
    assert (told["state"], told["host"], told["heard"]) == ("unknown", "node-7", 1e9 + 60)
    shown = run_command([*WHY, tmp_path]).stdout
    assert ": on node-7, last heard of 2001-09-" in shown
    assert ", at step 5 after 1.0 s" in shown
    assert "killed" not in shown


def test_a_loop_of_ones_own_is_timed_too(tmp_path: Path) -> None:
    began = time.time()
    with script_file(OWN_LOOP) as script:
        loops_s = float(run_command([sys.executable, script, tmp_path]).stdout.split()[-1])
    took = time.time() - began
    told = why(tmp_path)
    # The kernel notes a start in hundredths of a second.
    assert 0.6 * took < told["wall_seconds"] <= took + 0.02, "from the start of the process on"
    assert (told["state"], told["step"]) == ("ended", 16)
    assert told["finding"]["name"] == "evaluate"
    assert told["seconds"]["step"] >= 0.16
    assert told["seconds"]["evaluate"] >= 2.4
    assert told["seconds"]["save"] > 0
    parts = (told["seconds"][name] for name in ("step", "evaluate", "save"))
    assert sum(parts) <= loops_s + 0.01, "nothing counts twice"
    shown = run_command([*WHY, tmp_path]).stdout
    assert f"{tmp_path}: ended at step 16 after" in shown
    assert told["finding"]["remedy"] in shown


def test_a_folder_without_a_run_is_refused_in_words(tmp_path: Path) -> None:
    told = run_command([*WHY, tmp_path], check=False)
    assert told.returncode == 2
    assert "There is no record of a run in" in told.stderr
    assert "output_dir of a Trainer" in told.stderr


def test_every_view_of_a_resumed_run_has_the_same_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "timesheet.jsonl").read_text().splitlines()]
    for line in lines[-5:]:  # the second life is another than the first
        line["seconds"] = {"start": 1.0, "data": 60.0, "step": 30.0}
    (folder / "timesheet.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setenv("COLUMNS", "120")

    said = {
        words: CliRunner().invoke(app, [*words.split(), str(folder)]).output
        for words in ("why", "watch --once", "report")
    }
    said["page"] = (folder / "report.html").read_text()
    state = told_by_the_page(RunView(open_run(folder), SilentDisplay))
    said["web"] = f"{state['spent']} {state['ledger']}"

    both = {"start": 6.0, "data": 66.0, "step": 58.0, "evaluate": 4.0, "save": 2.0}
    shares = {name: spent / sum(both.values()) for name, spent in both.items()}
    for name, share in shares.items():
        for view in ("why", "page"):
            assert re.search(rf"{name}\b[^%]*\b{share:.1%}", said[view]), (view, name, said[view])
        assert f"{round(share, 4)}" in said["web"]
    assert f"time, over both starts  data {shares['data']:.0%}" in said["watch --once"]
    for view in ("why", "page", "web"):
        assert "over both starts" in said[view]
    for view in ("why", "page"):
        assert f"{shares['data']:.0%} of the time: waiting for the next batch." in said[view]
