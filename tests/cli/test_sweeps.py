"""The folder of a search, given to the commands that take the folder of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from anytrain.cli.main import app
from anytrain.core.records import SWEEP, open_sweep
from anytrain.insight.report.sweep_page import build
from written_runs import write_run

EVIL = "<img src=x onerror=alert(1)>"


def trial(number: int, objective: Any, state: str = "complete", **parameters: Any) -> Any:
    values = [] if objective is None else [objective]
    found = {"number": number, "folder": f"run-{number}", "state": state}
    return {**found, "parameters": {"rate": 10.0**-number, **parameters}, "objectives": values}


TRIALS = [
    trial(0, 0.5, kind="a", same=7),
    trial(1, 0.75, kind="b", same=7),
    trial(2, 0.25, kind="a", same=7),
    trial(3, 0.9, "pruned", kind="b", same=7),
    trial(4, None, "running", kind=EVIL, same=7),
]


def write_sweep(folder: Path, trials: list[Any], directions: Any = ("maximize",)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    found = {"format": 1, "directions": list(directions), "trials": trials}
    (folder / SWEEP).write_text(json.dumps(found))
    return folder


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sweep(tmp_path_factory.mktemp("searched") / "a search", TRIALS)
    for number in range(4):
        write_run(folder / f"run-{number}", f"n{number}")
    return folder


def asked(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "300"})


def cells(text: str, place: int) -> list[str]:
    rows = re.findall(r"<tr>(.*?)</tr>", text, re.S)[1:]
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)[place] for row in rows]
    return [re.sub(r"<[^>]*>", "", each) for each in found]


def test_a_report_is_a_leaderboard_with_a_report_of_each_trial(searched: Path) -> None:
    done = asked("report", searched)
    assert done.exit_code == 0, done.output
    text = (searched / "report.html").read_text()
    assert cells(text, 0) == ["run-1", "run-0", "run-2", "run-3", "run-4"]
    assert cells(text, 1) == ["0.75", "0.5", "0.25", "0.9", "-"]
    assert re.findall(r'href="(run-\d/report.html)"', text) == [
        f"run-{n}/report.html" for n in (1, 0, 2, 3)
    ]
    assert (searched / "run-2/report.html").is_file()
    assert re.findall(r"<figcaption>(.*?)<", text) == ["objective by rate", "objective by kind"]
    assert text.count("<circle") == 2 * 3
    assert "The same in every trial: same 7." in text
    assert EVIL not in text and "&lt;img src=x" in text


def test_a_report_elsewhere_links_to_the_trials(searched: Path) -> None:
    done = asked("report", searched, "-o", searched.parent / "deep" / "page.html")
    assert done.exit_code == 0, done.output
    text = (searched.parent / "deep/page.html").read_text()
    assert 'href="../a%20search/run-1/report.html"' in text


@pytest.mark.parametrize("words", [["why"], ["watch", "--once"]])
def test_of_a_search_the_newest_trial_is_taken_and_the_best_named(
    searched: Path, words: list[str]
) -> None:
    done = asked(*words, searched)
    assert done.exit_code == 0, done.output
    assert "is a search of 5 trials; taking the newest, run-3. Another: anytrain" in done.stderr
    assert f"{searched / 'run-1'} (the best)" in done.stderr
    assert "n3" in done.stdout


def test_a_difference_is_that_between_the_trials(searched: Path) -> None:
    done = asked("diff", searched, "--json")
    assert done.exit_code == 0, done.output
    runs = json.loads(done.stdout)["runs"]
    assert [run["name"] for run in runs] == ["n1", "n0", "n2", "n3"]


@pytest.mark.parametrize("command", ["why", "watch", "diff"])
def test_a_search_that_has_not_begun_a_trial_says_so(tmp_path: Path, command: str) -> None:
    done = asked(command, write_sweep(tmp_path, [TRIALS[4]]))
    assert done.exit_code == 2
    assert "none of the trials of the search in it has a record yet" in done.output


def test_a_run_beside_a_search_has_a_page_of_its_own(tmp_path: Path) -> None:
    write_run(write_sweep(tmp_path, TRIALS))
    done = asked("report", tmp_path)
    assert done.stdout.split() == [str(tmp_path / "report.html"), str(tmp_path / "sweep.html")]
    assert "objective by rate" in (tmp_path / "sweep.html").read_text()
    assert asked("why", tmp_path).stderr == ""


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"number": "one", "folder": "x"},
        {"number": float("inf"), "folder": "x"},
        {"number": 1, "folder": 7},
        {"number": 1, "folder": "../out", "objectives": "x", "parameters": [1]},
        {"number": 1, "folder": "/etc", "state": "complete", "objectives": []},
        trial(1, float("nan")),
        trial(1, 1e308, huge=10**400, deep=[[{}]], none=None),
    ],
)
def test_a_damaged_record_of_a_search_is_shown_as_far_as_it_goes(
    tmp_path: Path, entry: dict[str, Any]
) -> None:
    sweep = open_sweep(write_sweep(tmp_path / "search", [TRIALS[0], TRIALS[2], entry], ["?"]))
    assert sweep is not None
    assert all(found.folder.is_relative_to(sweep.folder) for found in sweep.trials)
    assert not any(".." in found.folder.parts for found in sweep.trials)
    assert "run-2" in build(sweep, {}, {})


def test_marks_of_an_axis_do_not_stand_in_each_other(tmp_path: Path) -> None:
    rates = (0.0006, 0.0027, 0.0077, 0.0125)
    near = [trial(n, float(n), rate=rate) for n, rate in enumerate(rates)]
    sweep = open_sweep(write_sweep(tmp_path, near))
    assert sweep is not None
    chart = build(sweep, {}, {}).rpartition("<figure")[2]
    marks = re.findall(r"<text[^>]*>(0\.0\d+)</text>", chart)
    assert marks == ["0.0006", "0.00655", "0.0125"]


def test_several_objectives_have_a_column_and_a_chart_each(tmp_path: Path) -> None:
    trials = [trial(0, 1.0), trial(1, 2.0)]
    for each in trials:
        each["objectives"].append(3.5)
    sweep = open_sweep(write_sweep(tmp_path, trials, ("minimize", "maximize")))
    assert sweep is not None and sweep.best is None
    text = build(sweep, {}, {})
    assert cells(text, 2) == ["3.5", "3.5"]
    assert "objective 2 by rate" in text
    assert "minimize objective 1, maximize objective 2" in text
