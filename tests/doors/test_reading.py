"""`anytrain.report` and `anytrain.why`: what the commands give, for Python and notebooks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import anytrain
from anytrain.cli.main import app
from anytrain.core.errors import BadInput
from written_runs import write_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs below it, of which the second is the newer one."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("old", "new")):
        for file in write_run(tmp_path / "runs" / name, name).iterdir():
            os.utime(file, (1000 + age, 1000 + age))
    return tmp_path


def test_a_report_is_written_and_says_where(runs: Path) -> None:
    made = anytrain.report("runs/old")
    assert repr(made) == "Report of runs/old: runs/old/report.html"
    assert made.path == Path("runs/old/report.html")
    text = Path(made).read_text(encoding="utf-8")  # it is a path itself
    assert text.startswith("<!doctype html>")
    assert anytrain.report("runs/old", runs / "mine.html").path == runs / "mine.html"


def test_a_notebook_shows_the_report_in_a_frame_of_its_own(runs: Path) -> None:
    shown = anytrain.report("runs/old")._repr_html_()
    assert 'sandbox="allow-scripts"' in shown
    assert "srcdoc=" in shown
    assert "<code>runs/old/report.html</code>" in shown
    assert "<h1" not in shown  # all of the page is an attribute's text


def test_why_says_what_the_command_prints(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    printed = CliRunner().invoke(app, ["why", "runs/old"]).stdout
    found = anytrain.why("runs/old")
    assert repr(found) == printed.rstrip()
    assert found.told["run"] == "runs/old"
    shown = found._repr_html_()
    assert "<table>" in shown
    assert "waiting for the next batch" in shown


def test_without_a_run_the_newest_below_is_taken(runs: Path) -> None:
    assert anytrain.report().run == Path("runs/new")
    assert anytrain.why().told["run"] == "runs/new"


def test_where_there_is_none_the_error_says_how_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="There is no run below") as refused:
        anytrain.why()
    assert 'anytrain.why("PATH")' in str(refused.value)


def test_neither_loads_torch(runs: Path) -> None:
    code = (
        "import sys, anytrain; anytrain.report('runs/old'); anytrain.why('runs/old');"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=runs)
