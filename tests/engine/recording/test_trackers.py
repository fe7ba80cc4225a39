from __future__ import annotations

import argparse
import csv
import json
import random
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytrain.core.errors import BadInput, BadType, Notice, Unsupported
from anytrain.engine.recording import trackers
from anytrain.engine.recording.trackers import Trackers, available, register, resolve
from anytrain.engine.recording.trackers.general import GeneralTracker


class Listed(GeneralTracker):
    """Keep all calls in a list."""

    name = "listed"
    requires_logging_directory = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.calls: list[Any] = [("made", args, kwargs)] if args or kwargs else []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((step, values, kwargs))

    def finish(self) -> None:
        self.calls.append("finish")


class Failing(Listed):
    """Fail at the named steps, and at the end if asked."""

    name = "failing"

    def __init__(self, steps: set[int], at_end: bool = False) -> None:
        super().__init__()
        self.steps, self.at_end = steps, at_end

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log(values, step, **kwargs)
        if step in self.steps:
            raise ConnectionError(f"no server at step {step}")

    def finish(self) -> None:
        super().finish()
        if self.at_end:
            raise OSError("cannot close")


@pytest.fixture
def table() -> Iterator[None]:
    before = dict(trackers.TABLE)
    yield
    trackers.TABLE.clear()
    trackers.TABLE.update(before)


# What log_with means


def test_nothing_means_no_tracker() -> None:
    assert resolve(None, None) == [] and resolve([], None) == []


def test_names_enums_and_instances_are_taken_once_and_in_order(tmp_path: Path) -> None:
    class Logger(Enum):
        CSV = "csv"

    mine = Listed()
    wanted = ["jsonl", Logger.CSV, mine, "jsonl", "csv", mine]
    assert resolve(wanted, tmp_path) == ["jsonl", "csv", mine]
    assert resolve("jsonl", tmp_path) == ["jsonl"]
    assert resolve(mine, None) == [mine]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="(?s)Unknown tracker 'wanbd'.*'tensorboard'.*'jsonl'"):
        resolve("wanbd", None)


@pytest.mark.parametrize("name", ["aim", "comet_ml", "clearml", "dvclive", "swanlab"])
def test_a_known_tracker_that_is_not_served_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(Unsupported, match=f"(?s)'{name}'.*own GeneralTracker subclass"):
        resolve([name], None)


def test_a_tracker_that_writes_files_needs_a_folder() -> None:
    with pytest.raises(BadInput, match="(?s)`jsonl`.*project_dir"):
        resolve("jsonl", None)


def test_an_absent_library_is_refused_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "is_installed", lambda module: False)
    with pytest.raises(BadInput, match=r"(?s)'wandb' is not installed.*anytrain\[trackers\]"):
        resolve("wandb", None)
    with pytest.raises(BadInput, match="(?s)'all'.*none of 'tensorboard'"):
        resolve("all", None)


def test_all_means_every_installed_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trackers, "is_installed", lambda module: module in ("wandb", "tensorboard"))
    mine = Listed()
    with pytest.warns(Notice, match="'all' means 'tensorboard', 'wandb' here: 'mlflow', 'trackio'"):
        assert resolve(["all", mine], tmp_path) == ["tensorboard", "wandb", mine]
    assert available() == ["tensorboard", "wandb", "jsonl", "csv"]


def test_all_needs_a_folder_if_one_of_them_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "is_installed", lambda module: module == "tensorboard")
    with (
        pytest.warns(Notice, match="'all' means 'tensorboard' here"),
        pytest.raises(BadInput, match="(?s)`tensorboard`.*no folder"),
    ):
        resolve("all", None)


def test_a_class_in_place_of_an_instance_is_refused() -> None:
    with pytest.raises(BadType, match="instance"):
        resolve(Listed, None)


def test_an_instance_that_never_called_its_base_is_checked_too() -> None:
    class Bare(GeneralTracker):
        name = "bare"

        def __init__(self) -> None:
            pass

    with pytest.raises(BadType, match="'requires_logging_directory' and 'tracker'"):
        resolve(Bare(), None)


@pytest.mark.usefixtures("table")
def test_a_registered_class_is_chosen_by_its_name() -> None:
    register(Listed)
    run = Trackers(resolve("listed", None))
    run.start("project", init_kwargs={"listed": {"tag": 1}})
    assert run.get("listed").calls == [("made", ("project",), {"tag": 1}), "start"]


@pytest.mark.usefixtures("table")
def test_only_a_tracker_class_with_a_name_can_be_registered() -> None:
    with pytest.raises(BadType, match="not an instance"):
        register(Listed())  # type: ignore[arg-type]  # the mistake under test
    nameless = type("Nameless", (GeneralTracker,), {"requires_logging_directory": False})
    with pytest.raises(BadInput, match="Nameless"):
        register(nameless)


# A run


def test_a_run_goes_from_start_to_finish() -> None:
    mine = Listed()
    run = Trackers([mine])
    run.start("project", config={"lr": 0.1})
    run.log({"loss": 1.0}, step=1, log_kwargs={"listed": {"commit": False}, "other": {"x": 1}})
    run.finish()
    run.finish()
    assert mine.calls == [
        "start",
        ("config", {"lr": 0.1}),
        (1, {"loss": 1.0}, {"commit": False}),
        "finish",
    ]


def test_a_users_tracker_gets_tensors_as_they_were_logged(tmp_path: Path) -> None:
    mine, loss = Listed(), torch.tensor(0.5)
    run = Trackers(["jsonl", mine], tmp_path)
    run.start("project")
    run.log({"loss": loss}, step=1)
    assert mine.calls[-1][1]["loss"] is loss
    assert json.loads(run.get("jsonl", unwrap=True).read_text())["loss"] == 0.5


def test_a_started_tracker_is_found_by_name() -> None:
    mine = Listed()
    run = Trackers([mine])
    run.start("project")
    assert run.get("listed") is mine
    assert run.get("listed", unwrap=True) is mine.calls
    assert list(run) == [mine]
    with pytest.raises(BadInput, match="(?s)'wandb'.*this run logs with 'listed'"):
        run.get("wandb")


def test_other_ranks_track_nothing(tmp_path: Path) -> None:
    mine = Listed()
    run = Trackers([mine, "jsonl"], tmp_path, is_main=False)
    run.start("project", config={"lr": 1})
    run.log({"loss": 1.0})
    blank = run.get("jsonl")
    blank.log({"loss": 1.0})
    run.finish()
    assert mine.calls == [] and list(tmp_path.iterdir()) == []


def test_logging_before_the_start_is_told_once() -> None:
    run = Trackers([Listed()])
    with pytest.warns(Notice, match="Nothing is recorded with 'listed'") as seen:
        run.log({"loss": 1.0})
        run.log({"loss": 1.0})
    assert len(seen) == 1


def test_logging_without_trackers_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Trackers()
        run.start("project", init_kwargs={"wandb": {"tags": []}})
        run.log({"loss": 1.0})
        run.finish()


def test_a_second_start_finishes_the_run_before() -> None:
    mine = Listed()
    run = Trackers([mine])
    run.start("one")
    run.start("two")
    assert mine.calls == ["start", "finish", "start"]


# Mistakes at the start


def test_a_wrong_option_is_raised_at_the_start(tmp_path: Path) -> None:
    first = Listed()
    run = Trackers([first, "jsonl"], tmp_path)
    with pytest.raises(BadInput, match="(?s)Cannot start the tracker 'jsonl'.*'colour'"):
        run.start("project", init_kwargs={"jsonl": {"colour": 1}})
    assert first.calls == ["start", "finish"]


def test_a_tracker_that_cannot_start_is_told_of_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    good = Listed()
    run = Trackers(["csv", good], tmp_path / "file")
    with pytest.warns(Notice, match="'csv' cannot start, and the run goes on.*NotADirectoryError"):
        run.start("project", goes_on_at=0)
    assert run.is_running and list(run) == [good]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.log({"loss": 1.0}, step=1)
        run.get("csv").log({"loss": 1.0})  # records nothing
        run.finish()
    assert (1, {"loss": 1.0}, {}) in good.calls


def test_a_run_whose_trackers_all_fail_to_start_goes_on_in_silence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = Trackers(["csv", "jsonl"], tmp_path / "file")
    with pytest.warns(Notice) as seen:
        run.start("project")
    assert len(seen) == 2 and run.is_running
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(train(run), train(None))


def test_settings_that_a_tracker_cannot_store_do_not_stop_it() -> None:
    class Unsettled(Listed):
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            raise RuntimeError("too many")

    mine = Unsettled()
    run = Trackers([mine])
    with pytest.warns(Notice, match="'listed' failed.*RuntimeError: too many"):
        run.start("project", config={"lr": 1})
    run.log({"loss": 1.0}, step=1)
    assert mine.calls[-1] == (1, {"loss": 1.0}, {})


class Returning(Listed):
    """A tracker with a way back into its run."""

    name = "returning"

    def go_on(self, run: str, step: int) -> None:
        self.calls.append(("go on", run, step))

    def kept_as(self) -> str | None:
        return "run-1"


def test_a_resumed_run_goes_on_in_the_trackers_run_of_its_project(tmp_path: Path) -> None:
    for project, step, expected in (
        ("one", 0, []),
        ("one", 40, [("go on", "run-1", 40)]),
        ("other", 40, []),
        ("other", 0, []),  # begun anew
    ):
        mine = Returning()
        run = Trackers([mine, "csv"], tmp_path)
        run.start(project, goes_on_at=step)
        run.finish()
        assert [call for call in mine.calls if call[0] == "go on"] == expected


def test_files_hold_each_step_once_after_a_resume_from_an_earlier_one(tmp_path: Path) -> None:
    for first, last in ((0, 5), (3, 7)):
        run = Trackers(["csv", "jsonl"], tmp_path)
        run.start("one", goes_on_at=first)
        if not first:
            run.log({"before": "a\u2028b"})
        for step in range(first + 1, last + 1):
            run.log({"loss": step / 10 + first}, step=step)
        run.finish()
    lines = (tmp_path / "one" / "metrics.jsonl").read_text().split("\n")
    told = [json.loads(line) for line in lines if line]
    assert [line["_step"] for line in told] == [None, 1, 2, 3, 4, 5, 6, 7]
    assert told[4]["loss"] == 3.4
    rows = list(csv.DictReader((tmp_path / "one" / "metrics.csv").open(newline="")))
    assert [row["_step"] for row in rows] == ["", "1", "2", "3", "4", "5", "6", "7"]
    assert rows[4]["loss"] == "3.4"


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_files_of_a_tracker_never_lie_in_the_run_s_own_folder(tmp_path: Path, name: str) -> None:
    run = Trackers([name], tmp_path / "fit" / "..", run_folder=tmp_path / "fit")
    with pytest.raises(BadInput, match="(?s)/fit\\.\n.*/fit is the run's own folder"):
        run.start("fit")
    assert not list(tmp_path.iterdir())
    run.start("other")
    assert (tmp_path / "other").is_dir()


def test_a_damaged_note_of_the_runs_begins_new_ones(tmp_path: Path) -> None:
    for damage in ("", "[1]", '{"project": "one", "runs": [2]}', '{"project": "one", "ru'):
        (tmp_path / "trackers.json").write_text(damage)
        mine = Returning()
        run = Trackers([mine], tmp_path)
        run.start("one", goes_on_at=3)
        run.finish()
        assert mine.calls == ["start", "finish"]


def test_runs_are_not_remembered_unless_asked(tmp_path: Path) -> None:
    run = Trackers([Returning()], tmp_path)
    run.start("one")
    assert not list(tmp_path.iterdir())


def test_options_for_a_tracker_that_is_not_in_use_are_ignored() -> None:
    Trackers([Listed()]).start("project", init_kwargs={"wandb": {"tags": ["a"]}})


def test_options_for_a_tracker_that_does_not_exist_are_refused() -> None:
    with pytest.raises(BadInput, match="(?s)init_kwargs for 'wanbd'.*'wandb'.*'listed'"):
        Trackers([Listed()]).start("project", init_kwargs={"wanbd": {"tags": ["a"]}})


def test_a_config_that_is_no_dictionary_is_refused() -> None:
    with pytest.raises(BadType, match=r"(?s)Namespace.*vars\(args\)"):
        Trackers([Listed()]).start("project", config=argparse.Namespace(lr=1))  # type: ignore[arg-type]  # the mistake under test


# Failures in the middle


def train(run: Trackers | None, steps: int = 6) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.log({"loss": loss}, step=step)
    if run is not None:
        run.finish()
    return model.weight.detach()


def test_a_tracker_that_always_fails_never_stops_the_run(tmp_path: Path) -> None:
    bad = Failing(steps=set(range(100)), at_end=True)
    run = Trackers([bad, "jsonl"], tmp_path)
    run.start("project")
    with pytest.warns(Notice) as seen:
        weight = train(run)
    assert torch.equal(weight, train(None))
    told = [str(w.message) for w in seen]
    assert len(told) == 2
    assert "'failing' failed" in told[0] and "ConnectionError: no server at step 0" in told[0]
    assert "'failing' is switched off after 3 failures in a row" in told[1]
    assert [c[0] for c in bad.calls if isinstance(c, tuple)] == [0, 1, 2]
    assert bad.calls[-1] == "finish"
    lines = (tmp_path / "project" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["_step"] for line in lines] == list(range(6))


def test_failures_that_are_not_in_a_row_switch_nothing_off() -> None:
    flaky = Failing(steps={0, 1, 3, 4})
    run = Trackers([flaky])
    run.start("project")
    with pytest.warns(Notice) as seen:
        train(run)
    assert len(seen) == 1
    assert [c[0] for c in flaky.calls if isinstance(c, tuple)] == list(range(6))


def test_a_tracker_that_holds_the_run_up_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Listed):
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            time.sleep(0.01)

    monkeypatch.setattr(trackers, "SLOW_S", 0.005)
    run = Trackers([Slow()])
    run.start("project")
    with pytest.warns(Notice) as seen:
        train(run)
    (told,) = (str(each.message) for each in seen)
    assert re.search(
        "The tracker 'listed' took \\d+ s for one log, and the run waited for it", told
    )


def test_a_failure_at_the_end_is_told_and_the_others_are_closed() -> None:
    bad, good = Failing(steps=set(), at_end=True), Listed()
    run = Trackers([bad, good])
    run.start("project")
    with pytest.warns(Notice, match="'failing' failed.*OSError: cannot close"):
        run.finish()
    assert good.calls[-1] == "finish"


def test_a_folder_deleted_under_a_run_does_not_stop_it(tmp_path: Path) -> None:
    run = Trackers(["jsonl", "csv"], tmp_path)
    run.start("project")
    run.log({"loss": 1.0}, step=0)
    shutil.rmtree(tmp_path / "project")
    with pytest.warns(Notice) as seen:
        train(run)
    told = sorted(str(w.message) for w in seen)
    assert len(told) == 4
    assert "'csv' failed" in told[0] and "FileNotFoundError" in told[0]
    assert "'jsonl' is switched off" in told[3]


def test_an_interrupt_inside_a_tracker_is_not_swallowed() -> None:
    class Interrupted(Listed):
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    run = Trackers([Interrupted()])
    run.start("project")
    with pytest.raises(KeyboardInterrupt):
        run.log({"loss": 1.0})


def states() -> list[Any]:
    """Return how the generators stand that a training may draw from."""
    numpys = np.random.get_state()
    return [random.getstate(), numpys[1].tolist(), *numpys[2:], torch.get_rng_state().tolist()]


class Drawing(Listed):
    """Draw from every generator, wherever it is called."""

    def draw(self, *args: Any, **kwargs: Any) -> None:
        random.random()
        np.random.rand()
        torch.rand(1)

    def __init__(self) -> None:
        super().__init__()
        self.draw()

    start = store_init_configuration = log = finish = go_on = draw


def test_no_tracker_moves_the_generators_that_the_run_draws_from() -> None:
    mine = Drawing()
    run, before = Trackers([mine]), states()
    for call in (
        lambda: run.start("project", {"lr": 1}),
        lambda: run.log({"loss": 1.0}, step=1),
        lambda: run.start("another"),
        run.finish,
    ):
        call()
        assert states() == before


def test_every_installed_library_records_one_run_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every name that is here, through one run; trackio's folder is fixed when it is imported.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY", "WANDB_SILENT"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    names = [name for name in available() if name != "trackio"]
    options = {"wandb": {"mode": "offline", "dir": str(tmp_path)}}
    run = Trackers(resolve(names, tmp_path), tmp_path)
    before = states()
    run.start("project", config={"lr": 0.1, "model": {"size": 2}}, init_kwargs=options)
    assert states() == before
    assert [tracker.name for tracker in run] == names
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        assert torch.equal(train(run), train(None))
