from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytrain.core.errors import BadInput, Notice
from anytrain.engine.recording.trackers import mlflow as ours
from anytrain.engine.recording.trackers.mlflow import MLflowTracker


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    library = pytest.importorskip("mlflow")
    yield library
    while library.active_run() is not None:
        library.end_run()


def run_of(library: Any, tracker: MLflowTracker) -> Any:
    return library.MlflowClient().get_run(tracker.tracker.info.run_id)


def test_values_and_settings_are_read_back(library: Any) -> None:
    tracker = MLflowTracker("experiment", run_name="first", tags={"who": "me"})
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "model": {"dtype": torch.float16}})
    tracker.log({"loss": torch.tensor(0.5), "eval": {"hits": np.int64(3)}, "ok": True}, step=1)
    tracker.log({"loss": 0.25}, step=2)
    tracker.finish()
    run = run_of(library, tracker)
    assert run.data.params == {"lr": "0.1", "model/dtype": "torch.float16"}
    assert run.data.metrics == {"loss": 0.25, "eval/hits": 3.0, "ok": 1.0}
    assert run.info.run_name == "first" and run.data.tags["who"] == "me"
    assert run.info.status == "FINISHED"
    steps = library.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in steps] == [(1, 0.5), (2, 0.25)]


def test_a_second_run_joins_the_same_experiment(library: Any) -> None:
    runs = []
    for _ in range(2):
        tracker = MLflowTracker("shared")
        tracker.start()
        tracker.finish()
        runs.append(run_of(library, tracker).info)
    assert runs[0].experiment_id == runs[1].experiment_id
    assert runs[0].run_id != runs[1].run_id


def test_a_run_is_taken_up_again_by_its_id(library: Any) -> None:
    first = MLflowTracker("again")
    first.start()
    first.finish()
    second = MLflowTracker("again", run_id=first.tracker.info.run_id)
    second.start()
    second.log({"loss": 1.0}, step=5)
    second.finish()
    assert run_of(library, first).data.metrics == {"loss": 1.0}


def test_more_settings_than_one_request_carries_are_all_stored(library: Any) -> None:
    tracker = MLflowTracker("many")
    tracker.start()
    tracker.store_init_configuration({f"p{i}": i for i in range(230)})
    tracker.finish()
    assert len(run_of(library, tracker).data.params) == 230


def test_what_mlflow_cannot_hold_is_named_once_and_the_rest_recorded(library: Any) -> None:
    tracker = MLflowTracker("odd")
    tracker.start()
    with pytest.warns(Notice) as seen:
        tracker.store_init_configuration({"long": "x" * 7000})
        for step in range(2):
            tracker.log({"acc@1": 0.5, "text": "no", "loss": 1.0}, step=step)
    tracker.finish()
    told = sorted(str(w.message) for w in seen)
    assert len(told) == 3
    assert "'acc@1'" in told[0] and "'acc_1'" in told[0]
    assert "'long'" in told[1] and "6000 of 7000" in told[1]
    assert "'text'" in told[2] and "is a str" in told[2]
    run = run_of(library, tracker)
    assert run.data.metrics == {"acc_1": 0.5, "loss": 1.0}
    assert len(run.data.params["long"]) == 6000


def test_another_thread_logs_to_the_same_run(library: Any) -> None:
    tracker = MLflowTracker("threads")
    tracker.start()
    thread = threading.Thread(target=tracker.log, args=({"loss": 2.0},))
    thread.start()
    thread.join()
    tracker.finish()
    assert run_of(library, tracker).data.metrics == {"loss": 2.0}


def test_finishing_closes_no_other_run(library: Any) -> None:
    outer = library.start_run()
    tracker = MLflowTracker("inner", nested_run=True)
    tracker.start()
    tracker.finish()
    tracker.finish()
    assert library.active_run().info.run_id == outer.info.run_id


def test_a_run_that_the_user_opened_is_logged_to_and_left_open(library: Any) -> None:
    with library.start_run(run_name="outer") as outer:
        library.log_param("lr", 0.5)
        tracker = MLflowTracker("elsewhere", run_name="inner", tags={"who": "me"})
        tracker.start()
        tracker.store_init_configuration({"lr": 0.1, "steps": 4})
        tracker.log({"loss": 1.0}, step=1)
        tracker.finish()
        assert library.active_run().info.run_id == outer.info.run_id
        assert run_of(library, tracker).info.status == "RUNNING"
    run = run_of(library, tracker)
    assert (run.info.run_id, run.info.run_name) == (outer.info.run_id, "outer")
    assert run.data.metrics == {"loss": 1.0} and run.data.tags["who"] == "me"
    assert run.data.params == {"lr": "0.5", "steps": "4"}  # what a run has, stays


def test_images_and_artifacts_land_in_the_logging_folder(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    note = tmp_path / "note.txt"
    note.write_text("kept")
    tracker = MLflowTracker("files", (tmp_path / "artifacts").as_uri())
    tracker.start()
    tracker.log_images({"seen": [np.zeros((4, 5, 3), dtype=np.uint8)]}, step=1)
    tracker.log_artifact(str(note))
    tracker.finish()
    kept = {p.name for p in (tmp_path / "artifacts").rglob("*") if p.is_file()}
    assert "note.txt" in kept and any(name.endswith(".png") for name in kept)


def test_a_database_store_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///runs.db")
    # mlflow-skinny alone: the same answer whether or not this machine has SQLAlchemy.
    monkeypatch.setattr(ours, "is_installed", lambda module: False)
    with pytest.raises(BadInput, match="pip install sqlalchemy alembic"):
        MLflowTracker("x").start()
