"""`anytrain bench` as a person meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launching import run_command

BENCH = [sys.executable, "-m", "anytrain", "bench"]
TINY = ["--size", "tiny", "--max_steps", "3", "--warm_up", "1", "--cpu"]


def test_contenders_train_side_by_side_and_the_report_is_written(tmp_path: Path) -> None:
    words = ["--contenders", "raw-fp32,hf-tf32,anytrain-fp32-padded"]
    told = run_command(
        [*BENCH, "glue", *TINY, *words, "--output", "a/b.md", "--json", "b.json"], cwd=tmp_path
    ).stdout
    assert "hf-tf32: left out, tf32 needs a CUDA device" in told
    found = json.loads((tmp_path / "b.json").read_text())
    assert [run["name"] for run in found["runs"]] == ["raw-fp32", "anytrain-fp32-padded"]
    assert found["machine"]["rows"] == 192
    ours = next(run for run in found["runs"] if run["name"] == "anytrain-fp32-padded")
    assert ours["plan"]["precision"].startswith("no")
    written = (tmp_path / "a/b.md").read_text()
    assert "| anytrain-fp32-padded |" in written
    assert "x raw-fp32 |" in written, "the like-for-like column"


@pytest.mark.full
def test_a_contender_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    # A batch of no rows is a mistake that only the contender's own process finds.
    words = ["--contenders", "raw-fp32", "--batch_size", "-1"]
    told = run_command([*BENCH, "glue", *TINY, *words], cwd=tmp_path, check=False)
    assert "raw-fp32 failed; the end of what it said:" in told.stdout
    assert "batch_size" in told.stdout
    assert "raw-fp32: left out, it failed: it ended with code 1: ValueError" in told.stdout


@pytest.mark.timeout(900)  # 16 contenders; a processor without bf16 is slow at half of them
@pytest.mark.full
def test_every_peer_trains_and_ours_learns_what_hf_learns(tmp_path: Path) -> None:
    words = ["--size", "tiny", "--cpu", "--epochs", "6", "--json", "b.json"]
    told = run_command([*BENCH, "glue", *words], cwd=tmp_path, timeout=840).stdout
    found = json.loads((tmp_path / "b.json").read_text())
    assert list(found["left_out"]) == ["hf-tf32"]
    assert len(found["runs"]) == 16
    # Precision, padding and order differ between contenders, and 42 held-out rows show it. Where
    # all three are the same, so is what was learnt.
    runs = {run["name"]: run for run in found["runs"]}
    for figure in ("train_loss", "accuracy", "eval_loss"):
        assert runs["anytrain-fp32-padded"][figure] == pytest.approx(runs["hf"][figure], rel=1e-6)
    # bf16 moves by 1.5 % from run to run of one contender: the comparison's own bound.
    ours, theirs = (runs[name]["train_loss"] for name in ("anytrain-bf16-padded", "hf-bf16"))
    assert ours == pytest.approx(theirs, rel=0.1)
    assert "learnt" in told


def test_contenders_can_be_listed_without_loading_torch() -> None:
    told = run_command([*BENCH, "glue", "--list"]).stdout
    assert "hf-bf16-dynamic" in told


def test_scripts_are_compared(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('samples_per_second 10')")
    (tmp_path / "b.py").write_text("print('samples_per_second 30')")
    words = ["script", "a.py", "b.py", "--rounds", "1", "--output", "c.md"]
    told = run_command([*BENCH, *words], cwd=tmp_path).stdout
    assert "3.00" in told
    assert "| b.py | 30 | 30 | 30 | 3.00 |" in (tmp_path / "c.md").read_text()


def test_a_wrong_size_is_refused_in_words() -> None:
    told = run_command([*BENCH, "glue", "--size", "huge"], check=False)
    assert told.returncode == 2
    assert "Unknown size 'huge'" in told.stderr
