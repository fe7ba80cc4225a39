"""`anytrain checkpoint` says what there is, and whether it is whole, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anytrain.cli.checkpoint import app
from anytrain.engine.checkpoint import Saved, Store
from checkpoints import small_run
from written_runs import write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    store = Store(tmp_path / "runs")
    for step in (1, 2, 3):
        assert isinstance(store.save(f"step-{step}", small_run().snapshot(step)), Saved)
    return tmp_path / "runs"


def said(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_list_shows_the_newest_first(runs: Path) -> None:
    lines = [line for line in said("list", runs).splitlines() if "step-" in line]
    assert ["step-3" in lines[0], "step-2" in lines[1], "step-1" in lines[2]] == [True] * 3
    assert "loss 0.25" in lines[0]
    found = json.loads(said("list", runs, "--json"))
    assert [entry["step"] for entry in found] == [3, 2, 1]
    assert all(entry["problem"] is None for entry in found)


def test_a_list_names_what_is_plainly_wrong(runs: Path) -> None:
    (runs / "step-2" / "state.json").unlink()
    (runs / "step-3" / "manifest.json").write_text("{")
    output = said("list", runs)
    assert "state.json: it is missing" in output
    assert "manifest.json: it cannot be read" in output


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_no_name_is_cut_in_any_terminal_nor_in_a_pipe(
    tmp_path: Path, width: int, is_terminal: bool
) -> None:
    name = "checkpoint-of-a-sweep-with-a-learning-rate-of-0.00003-and-seed-1234567890"
    run = tmp_path / "a-run-with-a-name"
    assert isinstance(Store(run).save(name, small_run().snapshot(1)), Saved)
    (run / name / "state.json").unlink()
    env = {"COLUMNS": f"{width}", "TTY_COMPATIBLE": f"{int(is_terminal)}", "NO_COLOR": "1"}
    for words in (["list", run], ["verify", run], ["list", tmp_path], ["show", run]):
        told = CliRunner().invoke(app, [str(word) for word in words], env=env).output
        assert name in told and "…" not in told
        assert words[0] == "show" or "state.json" in told
        if not is_terminal and words[0] == "list":
            (row,) = (line for line in told.splitlines() if name in line)
            assert "loss 0.5" in row and "state.json: it is missing" in row, "one line each"
    if is_terminal and width == 20:
        assert "\n  ranks: 1\n" in CliRunner().invoke(app, ["list", str(run)], env=env).output


def test_a_folder_of_runs_and_a_runs_inner_folders_are_looked_into(tmp_path: Path) -> None:
    for place in ("a", "b/checkpoints", "b/checkpoints/checkpoint_0/inner", "c/earlier-1", "c"):
        saved = Store(tmp_path / place).save(f"checkpoint-{len(place)}", small_run().snapshot(1))
        assert isinstance(saved, Saved)
    write_run(tmp_path / "c")
    (tmp_path / "c/model.safetensors").write_bytes(b"the trained model lies beside")

    def names(place: str) -> list[str]:
        return [entry["name"] for entry in json.loads(said("list", tmp_path / place, "--json"))]

    assert names("") == ["c/checkpoint-1", "a/checkpoint-1"]
    assert names("b") == ["checkpoints/checkpoint-13"]
    assert names("c") == ["checkpoint-1", "earlier-1/checkpoint-11"]
    assert "c/checkpoint-1" in said("list", tmp_path)
    assert "checkpoint-1" in said("show", tmp_path)
    assert "damaged" not in said("verify", tmp_path)


def test_prune_removes_nothing_below_the_folder_that_it_was_given(tmp_path: Path) -> None:
    for step in (1, 2):
        saved = Store(tmp_path / "run").save(f"step-{step}", small_run().snapshot(step))
        assert isinstance(saved, Saved)
    told = said("prune", tmp_path, "--keep-last", 1, "--yes", code=2)
    assert str(tmp_path / "run") in told.replace("\n", "")
    assert len(list((tmp_path / "run").iterdir())) == 2
    assert "Removed 1 checkpoint." in said("prune", tmp_path / "run", "--keep-last", 1, "--yes")


def test_show_tells_what_a_checkpoint_holds(runs: Path) -> None:
    (runs / "step-3" / "notes.md").write_text("mine")
    output = said("show", runs / "step-3")
    for word in ("step", "optimizer.safetensors", "precision", "loss 0.25", "notes.md", "torch"):
        assert word in output
    found = json.loads(said("show", runs, "--json"))  # the newest of a folder
    assert found["step"] == 3
    assert found["unlisted"] == ["notes.md"]
    model = next(file for file in found["files"] if file["file"] == "model.safetensors")
    assert model["tensors"] == len(small_run().model.state_dict())


def test_verify_finds_a_flipped_bit_and_exits_with_1(runs: Path) -> None:
    assert "damaged" not in said("verify", runs)
    damage(runs / "step-2" / "model.safetensors")
    output = said("verify", runs, code=1)
    assert output.count("whole") == 2
    assert "model.safetensors" in output
    assert "whole" in said("verify", runs / "step-1")
    found = json.loads(said("verify", runs / "step-2", "--json", code=1))
    assert [problem["file"] for problem in next(iter(found.values()))] == ["model.safetensors"]


def test_prune_removes_the_old_and_never_the_newest_whole(runs: Path) -> None:
    damage(runs / "step-3" / "model.safetensors")
    said("prune", runs, "--keep-last", 1, "--dry-run")
    assert len(list(runs.iterdir())) == 3
    assert "step-1" in said("prune", runs, "--keep-last", 1, "--yes")
    assert sorted(p.name for p in runs.iterdir()) == ["step-2", "step-3"]
    assert "Nothing to remove" in said("prune", runs, "--keep-last", 1, "--yes")


def test_prune_asks_before_it_removes(runs: Path) -> None:
    words = ["prune", str(runs), "--keep-last", "1"]
    assert CliRunner().invoke(app, words, input="n\n").exit_code == 0
    assert len(list(runs.iterdir())) == 3
    assert CliRunner().invoke(app, words, input="y\n").exit_code == 0
    assert [p.name for p in runs.iterdir()] == ["step-3"]


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_a_folder_without_any_is_said_plainly(tmp_path: Path, command: str) -> None:
    assert "There is no checkpoint in" in said(command, tmp_path, code=2)
    assert "There is no folder" in said(command, tmp_path / "nobody", code=2)


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_looking_at_checkpoints_loads_no_torch(runs: Path, command: str) -> None:
    code = (
        "import sys\n"
        "from anytrain.cli.checkpoint import app\n"
        "try:\n    app()\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    words = [sys.executable, "-c", code, command, str(runs)]
    subprocess.run(words, check=True, capture_output=True)


def test_an_exported_model_beside_checkpoints_is_none_of_them(runs: Path) -> None:
    final = runs / "final"
    final.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "training_args.json"):
        (final / name).write_bytes(b"{}")
    assert "final" not in said("verify", runs)
    assert "final" not in said("list", runs)
    assert "There is no checkpoint in" in said("verify", final, code=2)


@pytest.mark.parametrize("name", ["best", "checkpoint-7"])
def test_a_checkpoint_that_has_lost_its_manifest_is_damaged(runs: Path, name: str) -> None:
    (runs / "step-3").rename(runs / name)
    (runs / name / "manifest.json").unlink()
    if name == "checkpoint-7":  # of the model alone
        for each in (runs / name).iterdir():
            if not each.name.startswith("model"):
                each.unlink()
    assert f"{name} " in said("verify", runs, code=1)
