"""`anytrain preflight` and `anytrain parity`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launching import run_command

SCRIPT = """
import sys
import torch
from torch import nn
from anytrain import Accelerator

accelerator = Accelerator(mixed_precision=sys.argv[1], project_dir=sys.argv[2])
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader([(torch.ones(8), n % 2) for n in range(16)], batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    print(loss.item())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
open(sys.argv[2] + "/trained", "w").close()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def anytrain(*words: str, code: int = 0) -> Any:
    ran = run_command([sys.executable, "-m", "anytrain", *words], check=False)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran


def test_a_script_is_judged_for_each_target(tmp_path: Path, script: str) -> None:
    told, page = tmp_path / "told.json", tmp_path / "page.html"
    words = ["--quick", "--target", "mps:16GB", "--target", "cuda:24GB", "--json", str(told)]
    words += ["--html", str(page), "--fail-on", "warning"]
    words += ["--", "torchrun", "--nproc_per_node=2"]
    ran = anytrain("preflight", *words, script, "no", str(tmp_path), code=1)
    assert "2 processes cannot train together on mps" in ran.stdout
    assert "cuda:24GB: runs, fits" in ran.stdout
    assert "print(loss.item())" in ran.stdout
    found = json.loads(told.read_text())["targets"]
    assert [each["target"]["name"] for each in found] == ["mps:16GB", "cuda:24GB"]
    assert found[1]["findings"][0]["place"]["line"] == 14
    assert "print(loss.item())" in page.read_text()


def test_what_cannot_work_is_refused(tmp_path: Path, script: str) -> None:
    assert "There is no script" in anytrain("preflight", str(tmp_path / "none.py"), code=2).stderr
    assert "Unknown target" in anytrain("preflight", "--target", "abacus", script, code=2).stderr
    assert "There is no script" in anytrain("parity", str(tmp_path / "none.py"), code=2).stderr


@pytest.mark.parametrize(
    ("command", "words", "meant"),
    [("preflight", ["--targt", "mps"], "--target"), ("parity", ["--precison=bf16"], "--precision")],
)
def test_an_option_that_is_spelt_wrong_is_guessed(
    command: str, words: list[str], meant: str, script: str
) -> None:
    said = anytrain(command, *words, script, code=2).stderr
    assert f"There is no option {words[0]}." in said
    assert f"did you mean {meant}?" in said


def test_parity_takes_a_script_over_at_its_first_step(tmp_path: Path, script: str) -> None:
    ran = anytrain("parity", "--json", script, "bf16", str(tmp_path))
    assert "first training step" in ran.stderr
    told = json.loads(ran.stdout)
    assert told["is_equal"]
    assert told["dtype"] == "bfloat16"
    assert told["loss_is_stand_in"]  # the model returns logits
    assert 0 < told["worst"]["error"] < told["worst"]["tolerance"]
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["preflight", "--bogus", "SCRIPT"], "There is no option --bogus."),
        (["preflight", "-m", "nosuch.module"], "There is no module nosuch.module."),
        (["preflight", "--json", "/nowhere/at.json", "SCRIPT"], "Cannot write the report"),
        (["preflight", "--target", "mps:16GB@1.2", "SCRIPT"], "from 2.9 to 2.15"),
        (["parity", "torchrun", "SCRIPT"], "name the script alone"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(
    script: str, words: list[str], told: str
) -> None:
    ran = anytrain(*(script if word == "SCRIPT" else word for word in words), code=2)
    assert told in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_words_of_an_error_are_told_once(tmp_path: Path, script: str) -> None:
    ran = anytrain("preflight", "--quick", "--target", "cuda:24GB", script, "fp7", str(tmp_path))
    assert ran.stdout.count("Unknown mixed precision") == 1
    assert ran.stdout.count("why:") == 1
    assert "last words" not in ran.stdout


def test_parity_tells_a_scripts_own_error_as_the_scripts(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import anytrain\nrows = open('no such file').read()\n")
    told = anytrain("parity", str(path), code=2).stderr
    assert "broken.py" in told and "FileNotFoundError" in told
    assert "typer" not in told and "runpy" not in told
    assert "the script failed before its step could be compared" in told
