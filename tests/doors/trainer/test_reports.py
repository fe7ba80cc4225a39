from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from anytrain.core.errors import Notice
from anytrain.core.plan import Wishes
from anytrain.doors.callbacks import TrainerState
from anytrain.doors.trainer import Trainer
from anytrain.engine.assemble.session import session


class Reporting(Trainer):
    """A Trainer's reports with just what they stand on."""

    def __init__(self, folder: Path) -> None:
        self.args: Any = SimpleNamespace(output_dir=str(folder))
        self.state = TrainerState(global_step=3, log_history=[{"loss": 1.0, "step": 3}])
        self._session = session(Wishes())


@pytest.fixture
def reports(tmp_path: Path) -> Reporting:
    return Reporting(tmp_path / "out")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_one_process_is_the_main_one(reports: Reporting) -> None:
    assert reports.is_world_process_zero()
    assert reports.is_local_process_zero()


def test_metrics_are_printed_as_an_aligned_table(
    reports: Reporting, capsys: pytest.CaptureFixture[str]
) -> None:
    reports.log_metrics("train", {"train_loss": 0.51239, "epoch": 3.0, "train_runtime": 61.5})
    assert capsys.readouterr().out.splitlines() == [
        "***** train metrics *****",
        "  epoch         =        3.0",
        "  train_loss    =     0.5124",
        "  train_runtime = 0:01:01.50",
    ]


def test_a_table_of_no_metrics_is_its_title(
    reports: Reporting, capsys: pytest.CaptureFixture[str]
) -> None:
    reports.log_metrics("eval", {})
    assert capsys.readouterr().out == "***** eval metrics *****\n"


def test_results_of_every_split_gather_in_one_file(reports: Reporting) -> None:
    folder = Path(reports.args.output_dir)
    reports.save_metrics("train", {"train_loss": np.float32(0.5), "epoch": 1})
    reports.save_metrics("eval", {"eval_loss": 0.25, "epoch": 2})
    assert read(folder / "train_results.json") == {"epoch": 1, "train_loss": 0.5}
    assert read(folder / "eval_results.json") == {"epoch": 2, "eval_loss": 0.25}
    together = {"epoch": 2, "eval_loss": 0.25, "train_loss": 0.5}
    assert read(folder / "all_results.json") == together
    assert sorted(p.name for p in folder.iterdir()) == [
        "all_results.json",
        "eval_results.json",
        "train_results.json",
    ]


def test_a_split_may_be_kept_out_of_the_combined_file(reports: Reporting) -> None:
    reports.save_metrics("predict", {"test_loss": 1.0}, combined=False)
    folder = Path(reports.args.output_dir)
    assert [p.name for p in folder.iterdir()] == ["predict_results.json"]


def test_results_of_any_kind_are_written(reports: Reporting) -> None:
    found = {"vector": torch.arange(2), "array": np.ones((1, 2)), "kinds": {int}, 3: float("nan")}
    reports.save_metrics("eval", {**found, "table": {"a": np.float32(0.5)}})
    assert read(Path(reports.args.output_dir) / "eval_results.json") == {
        "3": "NaN",
        "array": [[1.0, 1.0]],
        "kinds": "{<class 'int'>}",
        "table": {"a": 0.5},
        "vector": [0, 1],
    }


def test_a_file_that_holds_no_results_begins_anew_with_a_notice(reports: Reporting) -> None:
    folder = Path(reports.args.output_dir)
    folder.mkdir()
    (folder / "all_results.json").write_text("{ cut")
    with pytest.warns(Notice, match="begins anew"):
        reports.save_metrics("eval", {"eval_loss": 1.0})
    assert read(folder / "all_results.json") == {"eval_loss": 1.0}


def test_the_state_lies_in_the_output_folder(reports: Reporting) -> None:
    reports.save_state()
    found = read(Path(reports.args.output_dir) / "trainer_state.json")
    assert found["global_step"] == 3
    assert found["log_history"] == [{"loss": 1.0, "step": 3}]
