"""What differs between runs, read from their records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import diffed_runs
from anytrain.core.errors import BadInput
from anytrain.insight.report.diff import compare, open_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real runs: two alike, one with another seed and learning rate, one shorter without eval."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "one": diffed_runs.train(folder / "one"),
        "again": diffed_runs.train(folder / "again"),
        "other": diffed_runs.train(folder / "other", learning_rate=0.05, seed=7),
        "short": diffed_runs.train(folder / "short", num_train_epochs=1, eval_strategy="no"),
    }


def found(*folders: Path) -> dict[str, Any]:
    return compare(open_runs(folders))


def rows(told: dict[str, Any], group: str) -> dict[str, list[Any]]:
    (each,) = (each for each in told["differences"] if each["group"] == group)
    return {row["name"]: row["values"] for row in each["rows"]}


def test_only_what_differs_is_told_and_the_rest_counted(runs: dict[str, Path]) -> None:
    told = found(runs["one"], runs["other"])
    assert rows(told, "arguments") == {"learning_rate": [0.01, 0.05], "seed": [42, 7]}
    assert not any(rows(told, group) for group in ("model", "data", "plan", "hardware"))
    same = {each["group"]: each["same"] for each in told["differences"]}
    assert same["arguments"] > 90 and same["data"] > 4 and same["plan"] > 5
    assert list(rows(told, "place")) == ["output_dir"]
    assert told["is_same"] is False


def test_an_equal_pair_is_the_same_in_everything_recorded(runs: dict[str, Path]) -> None:
    told = found(runs["one"], runs["again"])
    assert told["is_same"] is True
    assert {pair["said"] for curve in told["curves"] for pair in curve["pairs"]} == {
        "equal to the bit at all 48 shared steps",
        "equal to the bit at all 3 shared steps",
        "set beforehand: the same at all 48 shared steps",
    }
    assert all(figure["difference"] == [0.0, 0.0] for figure in told["figures"])


def test_a_run_is_the_same_as_itself(runs: dict[str, Path]) -> None:
    told = found(runs["one"], runs["one"])
    assert told["is_same"] is True
    assert not any(each["rows"] for each in told["differences"])


def test_figures_stand_side_by_side_with_what_was_logged(runs: dict[str, Path]) -> None:
    told = found(runs["one"], runs["other"])
    figures = {figure["name"]: figure for figure in told["figures"]}
    for n, name in enumerate(("one", "other")):
        lines = map(json.loads, (runs[name] / "metrics.jsonl").read_text().splitlines())
        evals = [line["eval_loss"] for line in lines if "eval_loss" in line]
        assert figures["eval_loss"]["last"][n] == evals[-1]
        assert figures["eval_loss"]["best"][n] == min(evals)
    last = figures["eval_loss"]["last"]
    assert figures["eval_loss"]["difference"] == [0.0, last[1] - last[0]]
    assert figures["grad_norm"]["best"] == [None, None]  # nobody can say which is better
    times = {row["name"]: row["values"] for row in told["times"]}
    assert all(value > 0 for value in times["samples per second"])
    assert set(times) >= {"seconds", "seconds per step", "seconds: step", "seconds: evaluate"}


def test_a_shorter_run_without_evaluation_is_compared_as_far_as_it_goes(
    runs: dict[str, Path],
) -> None:
    told = found(runs["one"], runs["short"], runs["other"])
    curves = {curve["name"]: curve["pairs"] for curve in told["curves"]}
    assert curves["loss"][0]["num_shared"] == 16 and curves["loss"][1]["num_shared"] == 48
    assert curves["eval_loss"][0] == {"run": "B", "said": "not logged"}
    assert curves["learning_rate"][0]["parts_at"] == 2
    assert [run["step"] for run in told["runs"]] == [48, 16, 48]
    (evals,) = (each for each in told["figures"] if each["name"] == "eval_loss")
    assert evals["last"][1] is None and evals["difference"][1] is None


def test_a_killed_run_is_compared_up_to_its_last_line(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("run.json", "metrics.jsonl", "timesheet.jsonl"):
        text = (runs["one"] / name).read_text()
        cut = len(text) if name == "run.json" else len(text) // 2 if name[0] == "m" else -40
        (tmp_path / name).write_text(text[:cut])
    told = found(runs["one"], tmp_path)
    assert told["runs"][1]["state"] in ("running", "killed")  # this process wrote it
    loss = told["curves"][0]["pairs"][0]
    assert loss["differ_from"] is None and 10 < loss["num_shared"] < 48
    assert told["is_same"] is False


def test_a_run_that_recorded_less_is_named_and_not_called_different(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text((runs["one"] / "metrics.jsonl").read_text())
    told = found(runs["one"], tmp_path)
    assert not any(each["rows"] for each in told["differences"])
    assert "B did not record its arguments." in told["notes"]
    assert told["is_same"] is False


def test_reasons_and_code_are_told(tmp_path: Path) -> None:
    one = diffed_runs.written(tmp_path / "a", {1: 1.0}, "a")
    other = diffed_runs.written(tmp_path / "b", {1: 1.0}, "b")
    told = found(one, other)
    assert rows(told, "code") == {"git commit": ["a", "b"], "git branch": ["a", "b"]}
    (plan,) = (each["rows"] for each in told["differences"] if each["group"] == "plan")
    assert plan == [{"name": "step", "values": ["a", "b"], "because": ["because a", "because b"]}]
    assert any("A and B ran with uncommitted changes" in note for note in told["notes"])


def test_damaged_records_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    one = diffed_runs.written(tmp_path / "a", {1: "NaN", 2: "Infinity", 3: [1], 4: True})
    odd = {"arguments": [1], "git": "x", "plan": {"step": 3}, "versions": None}
    other = diffed_runs.written(tmp_path / "b", {1: 1.0, 2: 2.0}, **odd)
    (other / "timesheet.jsonl").write_text('{"kind": "begin", "plan": 7}\n{"kind": "time", "se')
    told = found(one, other)
    assert told["curves"][0]["pairs"][0]["parts_at"] == 1


def test_one_run_and_a_folder_without_record_are_refused(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="nothing to compare"):
        open_runs([runs["one"]])
    with pytest.raises(BadInput, match="no record of a run"):
        open_runs([runs["one"], tmp_path])
