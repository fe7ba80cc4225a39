"""`anytrain demo` as a person meets it."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from anytrain.cli.main import app
from anytrain.recipes.demo.job import SameMeaning
from launching import child_environment, run_command

SHORT = ["--epochs", "1", "--pairs", "640"]
MEDIUM = ["--epochs", "2", "--pairs", "10000"]
DEMO = [sys.executable, "-m", "anytrain", "demo"]


def test_it_learns_shows_it_and_leaves_its_results(tmp_path: Path) -> None:
    told = run_command([*DEMO, "--epochs", "2"], cwd=tmp_path).stdout
    result = json.loads((tmp_path / "runs/demo/result.json").read_text())
    history = result["dev_accuracy_by_epoch"]
    assert 0.4 < history[0] < 0.6
    assert len(history) == 3
    assert result["dev_accuracy"] == history[-1] > 0.75
    assert f"-> {history[-1]:.1%}" in told
    assert "runs/demo/result.json" in told
    assert "right on pairs held out" in told, "the learning curve"
    assert "anytrain glue --model_name_or_path" in told, "how to go on"
    assert f"{shlex.quote(sys.executable)} -m anytrain env" in told, "as it was started"
    assert "pip install -e '.[text,report]'" in told
    assert "\x1b" not in told, "colours and bars are for terminals"
    SameMeaning().load_state_dict(load_file(tmp_path / "runs/demo/model.safetensors"))
    showed = json.loads((tmp_path / "runs/demo/evaluation.json").read_text())
    assert showed["classes"] == ["different", "same"]
    right = sum(showed["confusion"][number][number] for number in range(2))
    assert right / 1000 == history[-1]
    assert {"sentence1", "sentence2"} == set(showed["worst"][0]["inputs"])
    assert "Report: runs/demo/report.html" in told
    assert "<title>" in (tmp_path / "runs/demo/report.html").read_text()


def test_options_may_stand_in_a_file_and_what_follows_it_wins(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("pairs: 640\nepochs: 5\noutput: out\n")
    run_command([*DEMO, "run.yaml", "--epochs", "1"], cwd=tmp_path)
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert len(result["dev_accuracy_by_epoch"]) == 2, "before the first epoch and after it"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("run.yaml", "epochz: 1", "did you mean epochs?"),
        ("run.json", '{"epochs": "many"}', "'--epochs': not a whole number."),
        ("run.json", "[1]", "it holds a list, not names with their values."),
        ("run.yaml", "{not: [whole", "correct the file."),
        ("run.yaml", None, "there is no such file."),
    ],
)
def test_a_file_that_holds_no_options_is_refused(
    tmp_path: Path, name: str, text: str | None, told: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    done = CliRunner().invoke(app, ["demo", str(tmp_path / name)])
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.full
def test_the_whole_demo_is_right_on_nine_in_ten_pairs_it_never_saw(tmp_path: Path) -> None:
    run_command(DEMO, cwd=tmp_path, timeout=280)
    assert json.loads((tmp_path / "runs/demo/result.json").read_text())["dev_accuracy"] > 0.9


def test_a_second_run_replaces_the_first_and_says_the_same(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        told = run_command([*DEMO, *SHORT], cwd=tmp_path).stdout
        assert "Continuing" not in told
        results.append((tmp_path / "runs/demo/result.json").read_text())
    assert results[0] == results[1]


def test_what_is_no_demo_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/config.json").write_text("{}")
    told = run_command([*DEMO, *SHORT], cwd=tmp_path, check=False)
    assert told.returncode == 2
    assert "--output" in told.stderr
    assert [path.name for path in (tmp_path / "runs/demo").iterdir()] == ["config.json"]


def test_a_bar_moves_in_a_terminal_and_a_run_stopped_by_ctrl_c_goes_on(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*DEMO, *MEDIUM],
        cwd=tmp_path,
        env=child_environment({"TERM": "xterm", "COLUMNS": "100"}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = ""
    give_up = time.monotonic() + 240
    while "loss 0." not in shown and time.monotonic() < give_up:
        shown += os.read(ours, 65536).decode(errors="replace")
    os.killpg(process.pid, signal.SIGINT)
    while True:
        try:
            shown += os.read(ours, 65536).decode(errors="replace")
        except OSError:  # how a pty says that the other end is closed
            break
    assert process.wait(timeout=240) == 130
    assert "training" in shown
    assert "the same command continues this run" in shown
    assert "Traceback" not in shown
    told = run_command([*DEMO, *MEDIUM], cwd=tmp_path).stdout
    assert "Continuing the run in runs/demo" in told
    history = json.loads((tmp_path / "runs/demo/result.json").read_text())["dev_accuracy_by_epoch"]
    assert len(history) == 3, "the first life's evaluation is not forgotten"


@pytest.mark.full
def test_two_processes_train_as_one_and_speak_once(tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    told = run_command(
        [sys.executable, "-m", *launcher, "anytrain", "demo", *SHORT],
        cwd=tmp_path,
        env={"ANYTRAIN_DEVICE": "cpu"},
    ).stdout
    assert "cpu, 2 processes" in told
    assert told.count("Accuracy ") == 1
    assert (tmp_path / "runs/demo/model.safetensors").exists()


def test_it_needs_no_library_of_models_or_metrics(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('transformers', 'datasets', 'sklearn', 'scipy', 'tokenizers'):\n"
        "    sys.modules[name] = None  # as if it were not installed\n"
        f"sys.argv = ['anytrain', 'demo', *{SHORT!r}]\n"
        "from anytrain.cli.main import run\n"
        "run()\n"
    )
    run_command([sys.executable, "-c", program], cwd=tmp_path)
    assert (tmp_path / "runs/demo/result.json").exists()
