"""What a Trainer's run writes down of itself, whatever happens to it and to its disk."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.core import records
from anytrain.core.errors import Notice
from anytrain.doors.callbacks import TrainerCallback
from anytrain.insight.report.page import page
from anytrain.insight.report.page_curves import history
from equivalence import twins
from launching import child_environment, launch, run_script

TESTS = Path(__file__).parents[2]


def build(folder: Path | None, **given: Any) -> Any:
    given = {"model": twins.regression(dropout=0.3), "train_dataset": twins.points(16), **given}
    return twins.build(twins.OURS, folder, **given)


class Warns(TrainerCallback):
    """Say something at every step."""

    def on_step_end(self, *given: Any, **known: Any) -> None:
        warnings.warn("the data looks odd", UserWarning, stacklevel=1)


def test_a_start_tells_what_the_run_is_made_of(tmp_path: Path) -> None:
    build(
        tmp_path, eval_dataset=twins.points(4), run_name="mine", hub_token="hf_secretsecret"
    ).train()
    run = records.open_run(tmp_path)
    (start,) = run.starts
    assert (run.name, run.state) == ("mine", "finished")
    assert start["model"] == {
        "name": "Regression",
        "from": None,
        "num_parameters": 49,
        "num_trainable": 49,
    }
    assert {name: found["num_rows"] for name, found in start["data"].items()} == {
        "train": 16,
        "eval": 4,
    }
    assert start["data"]["train"]["columns"] == ["x", "labels"]
    assert start["plan"]["device"] == {"value": "cpu", "because": "argument use_cpu"}
    assert start["arguments"]["learning_rate"] == 1e-2
    assert start["hardware"]["num_cores"] >= 1
    assert start["hardware"]["memory_bytes"] > 1e8
    assert start["versions"]["torch"] == str(torch.__version__)
    assert "secretsecret" not in (tmp_path / records.RUN).read_text()


def test_each_of_several_evaluation_sets_is_described(tmp_path: Path) -> None:
    build(tmp_path, eval_dataset={"a": twins.points(3), "b": twins.points(4)}).train()
    (start,) = records.open_run(tmp_path).starts
    assert set(start["data"]) == {"train", "eval/a", "eval/b"}


def test_saves_removals_the_best_and_notices_are_events(tmp_path: Path) -> None:
    trainer = build(
        tmp_path,
        eval_dataset=twins.points(4),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        num_train_epochs=1,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
        callbacks=[Warns()],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.warns(UserWarning, match="looks odd"):
            trainer.train()
    events = records.open_run(tmp_path).events
    saved = [event for event in events if event["kind"] == "checkpoint"]
    assert [event["step"] for event in saved] == [2, 4]
    assert all(event["bytes"] > 1000 and event["seconds"] >= 0 for event in saved)
    best = [event for event in events if event["kind"] == "best"]
    assert best[-1]["path"] == trainer.state.best_model_checkpoint
    assert (best[-1]["metric"], best[-1]["value"]) == ("eval_loss", trainer.state.best_metric)
    removed = {event["path"] for event in events if event["kind"] == "removed"}
    assert removed == {e["path"] for e in saved} - {str(path) for path in tmp_path.glob("check*")}
    (notice,) = [event for event in events if event["kind"] == "notice"]
    assert (notice["text"], notice["count"], notice["step"]) == ("the data looks odd", 4, 1)


def test_the_best_checkpoints_evaluation_is_no_point_of_the_last_step(tmp_path: Path) -> None:
    trainer = build(
        tmp_path,
        eval_dataset=twins.points(4),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        num_train_epochs=1,
        metric_for_best_model="loss",
        greater_is_better=True,
        load_best_model_at_end=True,
    )
    trainer.train()
    during = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    assert during[0] > during[1], "the first evaluation is the best: more is better here"
    again = trainer.evaluate()["eval_loss"]
    run = records.open_run(tmp_path)
    assert history(run, "eval_loss") == [(2.0, during[0]), (4.0, during[1])]
    (apart,) = run.apart
    assert (apart["of"], apart["eval_loss"], apart["step"]) == ("checkpoint-2", again, 4)
    assert run.evaluations["eval"]["of"] == "checkpoint-2"
    (best,) = [event for event in run.events if event["kind"] == "best"]
    assert (best["step"], best["value"]) == (2, during[0])
    text = page(run)
    assert "eval_loss of checkpoint-2" in text
    assert "The last evaluation on 4 samples, of checkpoint-2, after step 4." in text
    assert "at step 2</small>" in text


def test_records_disturb_no_draw(tmp_path: Path) -> None:
    def noisy(rows: Any) -> Any:
        batch = torch.utils.data.default_collate(
            [{k: torch.tensor(v) for k, v in r.items()} for r in rows]
        )
        return {**batch, "x": batch["x"] + torch.randn_like(batch["x"]) * random.random()}

    losses = []
    for folder in (tmp_path, None):
        torch.manual_seed(3)
        trainer = build(tmp_path, data_collator=noisy, num_train_epochs=3)
        if folder is None:
            trainer.args.output_dir = None  # there is no place for records
        trainer.train()
        losses.append([entry.get("loss") for entry in trainer.state.log_history])
        losses.append([p.tolist() for p in trainer.model.parameters()])
    assert losses[:2] == losses[2:]


def test_padding_and_memory_are_on_the_timesheet_and_not_in_the_log(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "attention_mask": [1, 1], "labels": 0}] * 4
    rows += [{"input_ids": [3] * 8, "attention_mask": [1] * 8, "labels": 1}] * 4
    build(
        tmp_path,
        model=twins.bert(),
        train_dataset=rows,
        data_collator=twins.pad,
        per_device_train_batch_size=8,
        num_train_epochs=2,
    ).train()
    run = records.open_run(tmp_path)
    assert run.lives[-1].last["padding_share"] == pytest.approx(4 * 6 / 64)
    assert run.lives[-1].last["used_bytes"] > 0
    known = {"step", "epoch", "time", "loss", "grad_norm", "learning_rate"}
    assert set(run.metrics[0]) == known


def test_a_full_disk_stops_no_training(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    for name in ("metrics.jsonl", "events.jsonl", "timesheet.jsonl", "run.json.new"):
        os.symlink("/dev/full", tmp_path / name)
    with pytest.warns(Notice, match="Training goes on") as told:
        output = build(tmp_path, num_train_epochs=1).train()
    assert output.global_step == 4
    assert len(told) == 2, "once for the record, once for the timesheet"


WRITES = """
import sys
from pathlib import Path
sys.path.insert(0, TESTS)
from anytrain.doors.callbacks import TrainerCallback
from anytrain.insight.report.page import page
from anytrain.insight.report.page_curves import history
from equivalence import twins

folder, at, opened = Path(sys.argv[1]), [0], []

def hear(event, given):
    if event == "open" and isinstance(given[0], str) and given[0].startswith(str(folder)):
        if given[1] is not None and set(given[1]) & set("wa+x"):
            opened.append((Path(given[0]).name, at[0]))

class Counts(TrainerCallback):
    def on_step_begin(self, args, state, control, **known):
        at[0] = state.global_step + 1

trainer = twins.build(
    twins.OURS, folder, model=twins.regression(), train_dataset=twins.points(160),
    num_train_epochs=1, logging_steps=10, callbacks=[Counts()])
sys.addaudithook(hear)
trainer.train()
for name, step in opened:
    print(name, step)
"""


def test_between_log_points_nothing_is_written_but_the_timesheet(tmp_path: Path) -> None:
    told = run_script(WRITES.replace("TESTS", repr(str(TESTS))), tmp_path / "run").stdout
    writes = [line.split() for line in told.splitlines() if not line.startswith("{")]
    steps = {int(step) for name, step in writes if name != "timesheet.jsonl"}
    assert steps <= {0, 10, 20, 30, 40}
    assert {"metrics.jsonl", "run.json.new"} <= {name for name, _ in writes}


LIVES = """
import sys, time
sys.path.insert(0, TESTS)
from anytrain.doors.callbacks import TrainerCallback
from anytrain.insight.report.page import page
from anytrain.insight.report.page_curves import history
from equivalence import twins

class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **known):
        time.sleep(0.002 if state.global_step < 100 else 1000)  # it is killed before

twins.train(
    twins.OURS, sys.argv[1], model=lambda: twins.regression(dropout=0.3),
    train_dataset=twins.points(40), num_train_epochs=60, save_strategy="steps", save_steps=7,
    callbacks=[Slow()])
"""


def test_a_killed_run_has_a_clean_record_and_a_second_life_completes_it(tmp_path: Path) -> None:
    script, folder = tmp_path / "lives.py", tmp_path / "run"
    script.write_text(textwrap.dedent(LIVES.replace("TESTS", repr(str(TESTS)))))
    dice = random.Random(3)
    with (tmp_path / "out.txt").open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env=child_environment(),
            stdout=out,
            stderr=out,
        )
    try:
        wanted, end = dice.randrange(15, 60), time.monotonic() + 240
        while child.poll() is None and time.monotonic() < end:
            path = folder / records.METRICS
            if path.exists() and len(path.read_bytes().splitlines()) >= wanted:
                break
            time.sleep(0.005)
        assert records.open_run(folder).state == "running", (tmp_path / "out.txt").read_text()
        time.sleep(dice.random() * 0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    run = records.open_run(folder)
    assert run.state == "killed"
    seen = [entry["step"] for entry in run.metrics]
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) >= wanted
    before = {entry["step"]: entry["loss"] for entry in run.metrics}
    twins.train(
        twins.OURS,
        folder,
        resume=True,
        model=lambda: twins.regression(dropout=0.3),
        train_dataset=twins.points(40),
        num_train_epochs=60,
        save_strategy="steps",
        save_steps=200,
    )
    assert run.refresh()
    logged = [entry for entry in run.metrics if "loss" in entry]
    assert [entry["step"] for entry in logged] == list(range(1, 601))
    assert (len(run.starts), len(run.lives), run.state) == (2, 2, "finished")
    after = {entry["step"]: entry["loss"] for entry in logged}
    assert {step: after[step] for step in before} == before, "the second life drew the same"


RANKS = """
import os, sys
from pathlib import Path
sys.path.insert(0, TESTS)
import torch
from anytrain import Accelerator
from anytrain.insight.report.page import page
from anytrain.insight.report.page_curves import history
from equivalence import twins

root = Path(sys.argv[1])
twins.train(
    twins.OURS, root / "trainer", model=lambda: twins.regression(),
    train_dataset=twins.points(16), num_train_epochs=1, save_strategy="steps", save_steps=1)
accelerator = Accelerator(cpu=True, project_dir=root / "own")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    accelerator.log({"loss": accelerator.process_index})
accelerator.end_training()
"""


def test_of_two_processes_only_the_first_writes(tmp_path: Path) -> None:
    launch(RANKS.replace("TESTS", repr(str(TESTS))), 2, tmp_path)
    run = records.open_run(tmp_path / "trainer")
    assert [entry["step"] for entry in run.metrics if "loss" in entry] == [1, 2]
    assert [e["step"] for e in run.events if e["kind"] == "checkpoint"] == [1, 2]
    assert (len(run.starts), run.starts[0]["hardware"]["num_processes"]) == (1, 2)
    own = records.open_run(tmp_path / "own")
    assert [(entry["step"], entry["loss"]) for entry in own.metrics] == [(1, 0), (2, 0)]
    assert (len(own.starts), own.state) == (1, "finished")
    for line in (tmp_path / "own" / records.METRICS).read_text().splitlines():
        json.loads(line)
