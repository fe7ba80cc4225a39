"""`anytrain diff` as a person meets it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import diffed_runs
from anytrain.cli.main import app
from anytrain.insight.report.diff_views import fitted
from launching import run_command

DIFF = [sys.executable, "-m", "anytrain", "diff"]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three runs written by hand: the second leaves the first at step 20, the third is broken."""
    losses = {step: 1 / (1 + step) for step in range(40)}
    later = {step: loss + (step >= 20) for step, loss in losses.items()}
    return [
        diffed_runs.written(tmp_path / "a", losses, "a"),
        diffed_runs.written(tmp_path / "b", later, "b", arguments={"learning_rate": 0.3}),
        diffed_runs.written(tmp_path / "c", {0: 1.0, 1: "NaN"}, "c"),
    ]


def test_two_runs_are_told_side_by_side_and_plainly_in_a_pipe(folders: list[Path]) -> None:
    said = run_command([*DIFF, *folders[:2]]).stdout
    lines = [line.split() for line in said.splitlines()]
    assert ["arguments", "learning_rate", "0.1", "0.3"] in lines
    assert ["plan", "step", "a", "(because", "a)", "b", "(because", "b)"] in lines
    assert "equal to the bit up to step 19, part at step 20" in said
    assert "twice their fluctuation" in " ".join(said.split()) and "\x1b" not in said
    assert "Note: A and B ran with uncommitted changes" in said


def test_what_differs_is_never_cut_away_nor_rounded_off(tmp_path: Path) -> None:
    folders = []
    for name, digit in (("a", 67), ("b", 674)):
        arguments = {
            "lr": float(f"0.12345{digit}"),
            "rows": 1234567 + digit / 1000,
            "long": "x" * 40 + name + "y" * 40,
            "name": f"new\nline {digit}",
            "kind": digit if name == "a" else "67",
            "mark": "\x1b[31m" if name == "a" else r"\x1b[31m",
        }
        folders.append(diffed_runs.written(tmp_path / name, {1: 0.5}, "a", arguments=arguments))
    said = run_command([*DIFF, *folders]).stdout
    rows = [line.split() for line in said.splitlines()]
    assert ["arguments", "lr", "0.1234567", "0.12345674"] in rows
    assert ["arguments", "rows", "1234567.067", "1234567.674"] in rows
    assert ["arguments", "kind", "67", "'67'"] in rows
    assert ["arguments", "mark", r"'\x1b[31m'", r"'\\x1b[31m'"] in rows
    assert "x" * 40 + "a" + "y" * 40 in said  # a pipe gets all
    assert fitted(["x" * 40 + each + "y" * 40 for each in "ab"]) == [
        ".." + "x" * 19 + each + "y" * 36 + ".." for each in "ab"
    ]


def test_nothing_that_a_run_wrote_can_move_the_cursor(tmp_path: Path) -> None:
    folders = [
        diffed_runs.written(
            tmp_path / name, {1: 0.5, 2: 0.4}, f"\x1b[31m{name}", arguments={"\x1b[2J": name}
        )
        for name in "abc"
    ]
    for folder in folders:
        with (folder / "metrics.jsonl").open("a") as file:
            for step in (3, 4):
                file.write(json.dumps({"step": step, "\x1b]0;m\x07": 1.0}) + "\n")
    for some in (folders[:2], folders):
        said = run_command([*DIFF, *some]).stdout
        assert "]0;m" in said and "[2J" in said
        assert not set(said) & set("\x1b\x07\r")


WIDE = {"COLUMNS": "500", "TTY_COMPATIBLE": "1", "NO_COLOR": "1", "TERM": "xterm"}


def test_many_runs_are_a_table_with_a_row_each(folders: list[Path]) -> None:
    said = re.sub(r"\x1b\[\d*m", "", run_command([*DIFF, *folders], env=WIDE).stdout)
    head = next(line for line in said.splitlines() if line.split()[:3] == ["run", "state", "step"])
    assert "learning_rate" in head and "loss, last" in head and "loss, best" in head
    rows = [line.split()[:2] for line in said.splitlines() if line.startswith("  ")]
    assert all([name.upper(), name] in rows for name in "abc")


def test_in_a_pipe_many_runs_have_a_column_each(folders: list[Path]) -> None:
    lines = [line.split() for line in run_command([*DIFF, *folders]).stdout.splitlines()]
    assert ["A", "a", "B", "b", "C", "c"] in lines
    assert ["learning_rate", "0.1", "0.3", "0.1"] in lines
    assert ["loss,", "last", "0.025", "1.025", "nan"] in lines


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_no_line_is_longer_than_100_columns_nor_than_the_terminal(
    tmp_path: Path, count: int, kind: str
) -> None:
    losses = {step: 1 / (1 + step) for step in range(40)}
    folders = []
    for n in range(count):
        long = {"path": f"/{'deep' * 40}/{n}", "words": "some words " * 30 + f"{n}", "lr": n}
        start = {"arguments": long, "command": ["python", "train.py", *map(str, range(60 + n))]}
        folders.append(diffed_runs.written(tmp_path / f"run-{n}", losses, f"{n}", **start))
    env = {**WIDE, "COLUMNS": "80"} if kind == "terminal" else {}
    said = CliRunner().invoke(app, ["diff", *map(str, folders)], env=env).output
    lines = re.sub(r"\x1b\[\d*m", "", said).splitlines()
    assert max(map(len, lines)) <= (100 if kind == "pipe" else 80)
    assert "fewer than one in a hundred is said to part." in " ".join(" ".join(lines).split())
    if kind == "pipe":  # nothing is cut
        whole = "".join(line.strip() for line in lines)
        assert all(f"/{'deep' * 40}/{n}" in whole for n in range(count))


def test_what_is_set_beforehand_is_said_to_be_and_nothing_is_called_noise(tmp_path: Path) -> None:
    folders = []
    for n in range(2):
        folder = diffed_runs.written(tmp_path / f"run-{n}", {}, "w")
        lines = [
            {"step": s, "learning_rate": 1 - s / 50 - n * (s > 9) / 9, "lr_b": 0.5, "loss": s * n}
            for s in range(20)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        folders.append(folder)
    page = tmp_path / "page.html"
    words = ["diff", *map(str, folders)]
    said = CliRunner().invoke(app, words).output
    assert CliRunner().invoke(app, [*words, "-o", str(page)]).exit_code == 0
    for text in (said, page.read_text()):
        assert "set beforehand: another from step 10 on" in text
        assert "set beforehand: the same at all 20 shared steps" in text
        assert "noise" not in text.replace("has_noise", "")
    said = run_command([*DIFF, *folders, "--json"]).stdout
    pairs = {each["name"]: each["pairs"][0] for each in json.loads(said)["curves"]}
    assert pairs["learning_rate"]["parts_at"] == 10 and pairs["learning_rate"]["is_set"]
    assert not pairs["loss"]["is_set"]


def test_json_has_the_same_and_is_valid(folders: list[Path]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    told = json.loads(run_command([*DIFF, *folders, "--json"]).stdout, parse_constant=refuse)
    (loss,) = (figure for figure in told["figures"] if figure["name"] == "loss")
    assert loss["last"][2] == "NaN"
    assert [pair["parts_at"] for pair in told["curves"][0]["pairs"]] == [20, 1]


def test_the_same_run_twice_is_the_same(folders: list[Path]) -> None:
    said = run_command([*DIFF, folders[0], folders[0]]).stdout
    assert "The runs are the same in everything that was recorded." in said


def test_what_cannot_be_done_is_said(folders: list[Path], tmp_path: Path) -> None:
    for words, expected in (
        ([folders[0]], "nothing to compare with"),
        ([folders[0], tmp_path], "no record of a run"),
        ([*folders[:2], "-o", tmp_path / "missing" / "page.html"], "Cannot write"),
    ):
        done = run_command([*DIFF, *words], check=False)
        assert done.returncode == 2 and expected in done.stderr and "fix:" in done.stderr


def test_comparing_loads_no_torch(folders: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code = (
        "import sys; from anytrain.cli.diff import diff; from pathlib import Path;"
        "a, b, page = map(Path, sys.argv[1:]);"
        "diff([a, b], None, False); diff([a, b], page, False);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    run_command([sys.executable, "-c", code, *folders[:2], page])
    assert page.stat().st_size > 10_000
