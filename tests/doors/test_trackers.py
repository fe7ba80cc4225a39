"""Trackers by their own libraries, from outside: both doors, a resume, and what they stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import needs
import offline_wandb
from anytrain import Accelerator
from anytrain.core.errors import Notice, Unsupported
from anytrain.doors.training_args import TrainingArguments, convert
from anytrain.engine.recording import trackers
from anytrain.engine.recording.trackers.general import GeneralTracker
from equivalence import twins
from launching import run_script

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
}
LIBRARIES = ("tensorboard", "wandb", "mlflow", "trackio")
COMMON = """
import json, os, sys, warnings
import torch
from anytrain import Accelerator, Trainer, TrainingArguments
from anytrain.core.errors import Notice

folder = sys.argv[1]
warnings.simplefilter("error", Notice)
warnings.filterwarnings("ignore", "The saved run was to end", Notice)  # the second life is longer

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": (logits - labels).pow(2).mean(), "logits": logits}

rows = [{"x": torch.tensor([i / 8]), "labels": torch.tensor([1.0])} for i in range(8)]

def train(steps, **more):
    torch.manual_seed(0)
    args = TrainingArguments(folder + "/run", use_cpu=True, max_steps=steps, logging_steps=1,
        save_steps=2, disable_tqdm=True, run_name="first", **more)
    resume = steps > 4
    trainer = Trainer(Model(), args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=folder + "/run/checkpoint-2" if resume else None)
    trainer.end()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
"""
TRAIN = """
losses = [train(steps, report_to="all", project="ours") for steps in (4, 6)]
json.dump(losses, open(folder + "/losses.json", "w"))
"""
OWN_LOOP = """
accelerator = Accelerator(cpu=True, log_with="all", project_dir=folder + "/loop")
quiet = {"auto_log_cpu": False, "auto_log_gpu": False, "name": "looped"}
accelerator.init_trackers("loops", config={"lr": 0.1}, init_kwargs={
    "wandb": {"name": "looped"}, "trackio": quiet, "mlflow": {"run_name": "looped"}})
for step in range(3):
    accelerator.log({"loss": torch.tensor(1.0 / (step + 1))}, step=step)
accelerator.end_training()
"""
READ = """
from trackio.sqlite_storage import SQLiteStorage as Storage
stored = {"first": Storage.get_logs("ours", "first"), "looped": Storage.get_logs("loops", "looped"),
          "names": Storage.get_runs("ours")}
json.dump(stored, open(folder + "/trackio.json", "w"), default=str)
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training, its resume and a loop of one's own, recorded by every library there is.

    It takes 15 s: four libraries are imported.
    """
    for name in LIBRARIES:
        needs.tool(name)
    folder = tmp_path_factory.mktemp("tracked")
    here = {
        **OFFLINE,
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_DIR": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }
    run_script(COMMON + TRAIN + OWN_LOOP + READ, folder, env=here)
    return folder


def journal(folder: Path) -> dict[int, float]:
    """Return the losses of the run's own record, the last word on each step."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.full
def test_the_training_and_its_resume_are_what_was_recorded(tracked: Path) -> None:
    first, second = json.loads((tracked / "losses.json").read_text())
    assert list(journal(tracked)) == [1, 2, 3, 4, 5, 6]
    assert (len(first), len(second)) == (4, 6)


def events(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {event.step: event.value for event in read.Scalars(name)}


@pytest.mark.full
def test_tensorboard_reads_one_curve_of_both_lives(tracked: Path) -> None:
    found = events(tracked / "run" / "runs" / "first", "train/loss")
    assert found == pytest.approx(journal(tracked))
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert events(tracked / "loop" / "loops", "loss") == pytest.approx({0: 1.0, 1: 0.5, 2: 1 / 3})


@pytest.mark.full
def test_wandb_keeps_both_lives_under_one_id(tracked: Path) -> None:
    kept = json.loads((tracked / "run" / "runs" / "trackers.json").read_text())
    files = sorted(tracked.glob(f"wandb/offline-run-*/run-{kept['runs']['wandb']}.wandb"))
    assert len(files) == 2
    rows = [row for file in files for row in offline_wandb.history(offline_wandb.records(file))]
    losses = {row["_step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == pytest.approx(journal(tracked))
    others = set(tracked.glob("wandb/offline-run-*/run-*.wandb")) - set(files)
    (looped,) = (offline_wandb.history(offline_wandb.records(file)) for file in others)
    assert [(row["_step"], row["loss"]) for row in looped][:2] == [(0, 1.0), (1, 0.5)]


@pytest.mark.full
def test_mlflow_has_one_run_of_both_lives(tracked: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked}/mlflow.db")
    for project, name, steps in (("ours", "train/loss", range(1, 7)), ("loops", "loss", range(3))):
        experiment = client.get_experiment_by_name(project)
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FINISHED"
        found = {one.step: one.value for one in client.get_metric_history(run.info.run_id, name)}
        assert sorted(found) == list(steps)
        if project == "ours":
            assert found == pytest.approx(journal(tracked))
            assert run.data.params["logging_steps"] == "1" and run.info.run_name == "first"
        else:
            assert run.data.params == {"lr": "0.1"}


@pytest.mark.full
def test_trackio_has_one_run_of_both_lives(tracked: Path) -> None:
    stored = json.loads((tracked / "trackio.json").read_text())
    assert stored["names"] == ["first"]
    losses = {row["step"]: row["train/loss"] for row in stored["first"] if "train/loss" in row}
    assert losses == pytest.approx(journal(tracked))
    assert [(row["step"], row["loss"]) for row in stored["looped"]][:2] == [(0, 1.0), (1, 0.5)]


class Broken(GeneralTracker):
    """A tracker that fails in the place that it is named after."""

    name = "none of them"
    requires_logging_directory = False
    tracker = None

    def __init__(self, project: str) -> None:
        super().__init__()

    def start(self) -> None:
        self.fail("start")

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.fail("log")

    def finish(self) -> None:
        self.fail("finish")

    def fail(self, place: str) -> None:
        if place == self.name:
            raise OSError(28, f"No space left on device, in {place}")


def test_a_tracker_that_breaks_anywhere_changes_nothing_in_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ["start", "log", "finish"]
    for place in places:
        monkeypatch.setitem(trackers.TABLE, place, type(place, (Broken,), {"name": place}))
    given = {"train_dataset": twins.points(16), "num_train_epochs": 1, "logging_steps": 1}
    plain = twins.build(twins.OURS, tmp_path / "plain", model=twins.regression(), **given)
    plain.train()
    trainer = twins.build(
        twins.OURS,
        tmp_path / "run",
        model=twins.regression(),
        report_to=[*places, "jsonl"],
        **given,
    )
    with pytest.warns(Notice) as seen:
        trainer.train()
        trainer.end()
    told = [str(each.message) for each in seen]
    for place, times in zip(places, (1, 2, 1), strict=True):  # a log that fails is switched off
        about = [text for text in told if f"No space left on device, in {place}" in text]
        assert len(about) == times and all(f"The tracker '{place}'" in text for text in about)
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, trainer)]
    assert losses[0] == losses[1]
    (good,) = (tmp_path / "run" / "runs").rglob("metrics.jsonl")
    rows = map(json.loads, good.read_text().splitlines())
    assert [row["train/loss"] for row in rows if "train/loss" in row] == losses[0]


@pytest.mark.parametrize("name", ["comet_ml", "aim", "clearml", "dvclive", "swanlab"])
def test_a_tracker_that_is_not_served_is_refused_by_both_doors(name: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=f"(?s){name}.*tensorboard.*wandb.*mlflow.*trackio"):
        TrainingArguments(str(tmp_path), report_to=name, use_cpu=True)
    with pytest.raises(Unsupported, match=f"(?s){name}.*tensorboard.*wandb.*mlflow.*trackio"):
        Accelerator(cpu=True, log_with=name, project_dir=str(tmp_path))


def test_all_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(convert, "_is_installed", lambda name: name == "tensorboard")
    with pytest.warns(Notice, match="'all' means tensorboard here: wandb, mlflow, trackio"):
        args: Any = TrainingArguments(str(tmp_path), report_to="all", use_cpu=True)
    assert args.report_to == ["tensorboard"]
    assert TrainingArguments(str(tmp_path), report_to="none", use_cpu=True).report_to == []
