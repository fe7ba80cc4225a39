"""A run's folder: continued, refused, or cleared of its own files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anytrain.core.errors import BadInput
from anytrain.recipes import folder

SETTINGS = {"seed": 1, "learning_rate": 2e-5, "train_file": "a.csv"}
ANOTHER = {**SETTINGS, "seed": 2}


def _begun(path: Path) -> Path:
    folder.begin(path, folder.look(path, SETTINGS, overwrite=False), SETTINGS)
    return path


def test_an_empty_or_absent_folder_is_free(tmp_path: Path) -> None:
    assert folder.look(tmp_path, SETTINGS, overwrite=False).kind == "fresh"
    assert folder.look(tmp_path / "new", SETTINGS, overwrite=True).kind == "fresh"
    (tmp_path / "notes.md").write_text("mine")
    assert folder.look(tmp_path, SETTINGS, overwrite=False).kind == "fresh"


def test_the_same_run_is_continued_where_it_was_cut_short(tmp_path: Path) -> None:
    way = folder.look(_begun(tmp_path), SETTINGS, overwrite=False)
    assert way.kind == "continue"
    assert "Continuing" in way.said


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    folder.finish(_begun(tmp_path))
    with pytest.raises(BadInput, match="finished") as refused:
        folder.look(tmp_path, SETTINGS, overwrite=False)
    for way_out in ("--output_dir", "--overwrite_output_dir", "--resume_from_checkpoint"):
        assert way_out in refused.value.fix


def test_another_run_is_refused_and_the_settings_that_differ_are_named(tmp_path: Path) -> None:
    _begun(tmp_path)
    with pytest.raises(BadInput, match="other settings: seed was 1, is 2"):
        folder.look(tmp_path, ANOTHER, overwrite=False)
    assert folder.look(tmp_path, ANOTHER, overwrite=False, resume="x").kind == "resume"


@pytest.mark.parametrize("mark", ["config.json", "model.safetensors", "trainer_state.json"])
def test_a_model_of_somebody_else_is_not_trained_over(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).write_text("{}")
    with pytest.raises(BadInput, match="kept no run.json"):
        folder.look(tmp_path, SETTINGS, overwrite=False)


def test_a_record_that_cannot_be_read_counts_as_another_run(tmp_path: Path) -> None:
    (tmp_path / folder.RECORD).write_text('{"settings": {')
    with pytest.raises(BadInput, match="kept no run.json"):
        folder.look(tmp_path, SETTINGS, overwrite=False)


def test_starting_anew_removes_a_runs_own_files_and_nothing_else(tmp_path: Path) -> None:
    foreign = ["notes.md", "data/train.csv", "checkpoint-best/x", "my_model.bin"]
    foreign += ["checkpoint-20-kept/x", "runs/another/model.safetensors"]
    own = ["checkpoint-20/model.safetensors", "all_results.json", "metrics.jsonl", "config.json"]
    own += [".checkpoint-40.saving-0123456789ab-1-2-3/x", "report.html", "run.json.new"]
    own += ["evaluation-dev.json", "evaluation-dev.json.new", "evaluation.json.new"]
    for name in (*foreign, *own):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoint-9").symlink_to(tmp_path / "data")
    way = folder.look(tmp_path, SETTINGS, overwrite=True)
    assert (tmp_path / "all_results.json").exists(), "looking changes nothing"
    folder.begin(tmp_path, way, SETTINGS)
    assert [name for name in foreign if not (tmp_path / name).exists()] == []
    assert [name for name in own if (tmp_path / name).exists()] == []
    assert json.loads((tmp_path / folder.RECORD).read_text())["settings"] == SETTINGS
