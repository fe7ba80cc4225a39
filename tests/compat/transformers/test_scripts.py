"""Scripts written for HF's Trainer run here with their import lines changed and nothing else.

Each runs twice: as it is, and with `transformers` imported through anytrain. The losses agree.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import script_pieces
from script_pieces import Pieces

SCRIPTS = Path(__file__).parent / "scripts"
IMPORTS = [
    (re.compile(r"^from transformers\b", re.M), "from anytrain.compat.transformers"),
    (
        re.compile(r"^import transformers$", re.M),
        "import anytrain.compat.transformers as transformers",
    ),
]
CLOSE = {"rel": 1e-5, "abs": 1e-6}


def changed(source: str) -> str:
    for pattern, ours in IMPORTS:
        source = pattern.sub(ours, source)
    return source


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Pieces:
    return script_pieces.make(tmp_path_factory.mktemp("pieces"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a script both ways; return where each of them wrote."""
    from accelerate.state import AcceleratorState, GradientState

    def one(name: str, who: str, options: list[str]) -> Path:
        source = (SCRIPTS / f"{name}.py").read_text()
        script = tmp_path / f"{name}_{who}.py"
        script.write_text(source if who == "theirs" else changed(source))
        output = tmp_path / who
        monkeypatch.setattr(sys, "argv", [str(script), *options, "--output_dir", str(output)])
        runpy.run_path(str(script), run_name="__main__")
        return output

    def both(name: str, *options: Any) -> tuple[Path, Path]:
        given = [str(option) for option in options]
        return one(name, "theirs", given), one(name, "ours", given)

    yield both
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def results(folder: Path) -> dict[str, float]:
    found = json.loads((folder / "all_results.json").read_text())
    measured = ("_runtime", "_per_second", "total_flos")
    return {k: v for k, v in found.items() if not k.endswith(measured)}


def losses(folder: Path) -> list[tuple[int, float]]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]


def same_results(theirs: Path, ours: Path) -> None:
    expected = results(theirs)
    assert results(ours) == pytest.approx(expected, **CLOSE)
    assert "train_loss" in expected


def same_losses(theirs: Path, ours: Path) -> None:
    expected, found = losses(theirs), losses(ours)
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=2e-4)
    assert len(expected) > 3


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_only_import_lines_change(script: Path) -> None:
    before = script.read_text().splitlines()
    after = changed(script.read_text()).splitlines()
    different = [line for line, other in zip(before, after, strict=True) if line != other]
    assert different
    assert all(line.startswith(("from transformers", "import transformers")) for line in different)


def test_text_classification(run: Any, pieces: Pieces, tmp_path: Path) -> None:
    options = [
        *("--model_name_or_path", pieces.bert, "--data_cache", tmp_path / "cache"),
        *("--train_file", pieces.pairs, "--validation_file", pieces.checks),
        *("--do_train", "--do_eval", "--do_predict", "--use_cpu", "--report_to", "none"),
        *("--learning_rate", 5e-3, "--num_train_epochs", 2, "--per_device_train_batch_size", 8),
        *("--logging_steps", 1, "--save_steps", 4, "--disable_tqdm", True),
    ]
    theirs, ours = run("text_classification", *options)
    same_results(theirs, ours)
    same_losses(theirs, ours)
    assert (ours / "predictions.txt").read_text() == (theirs / "predictions.txt").read_text()
    for name in ("train_results.json", "eval_results.json", "README.md", "model.safetensors"):
        assert (ours / name).exists()
    assert (ours / "checkpoint-12").is_dir()
    # Run again, it finds its last checkpoint and has nothing left to do.
    before = load_file(ours / "model.safetensors")
    _, again = run("text_classification", *options)
    after = load_file(again / "model.safetensors")
    assert all((before[name] == after[name]).all() for name in before)


def test_causal_language_model(run: Any, pieces: Pieces, tmp_path: Path) -> None:
    theirs, ours = run(
        "causal_lm", "--tokenizer", pieces.bert, "--text", pieces.text, "--data_cache", tmp_path
    )
    same_results(theirs, ours)
    same_losses(theirs, ours)
    kept = sorted(p.name for p in ours.glob("checkpoint-*"))
    assert kept == sorted(p.name for p in theirs.glob("checkpoint-*"))


def test_sequence_to_sequence_with_generation(run: Any, pieces: Pieces, tmp_path: Path) -> None:
    theirs, ours = run(
        "seq2seq",
        *("--model_name_or_path", pieces.t5, "--train_file", pieces.pairs),
        *("--data_cache", tmp_path, "--predict_with_generate", "--generation_max_length", 12),
        *("--eval_strategy", "epoch", "--num_train_epochs", 2, "--learning_rate", 1e-2),
        *("--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 4, "--use_cpu"),
        *("--logging_steps", 1, "--report_to", "none", "--disable_tqdm", True),
    )
    same_results(theirs, ours)
    same_losses(theirs, ours)
    assert np.array_equal(np.load(ours / "generated.npy"), np.load(theirs / "generated.npy"))


def test_low_rank_adapters_are_saved_alone_and_resumed(run: Any, pieces: Pieces) -> None:
    theirs, ours = run("lora", "--model", pieces.bert)
    # HF's train_loss is over the steps since the resume, ours over the whole training.
    assert results(ours)["eval_loss"] == pytest.approx(results(theirs)["eval_loss"], **CLOSE)
    same_losses(theirs, ours)
    for folder in (ours, ours / "checkpoint-6"):
        assert (folder / "adapter_config.json").exists()
        assert (folder / "adapter_model.safetensors").exists()
        assert not (folder / "model.safetensors").exists()
    expected = load_file(theirs / "adapter_model.safetensors")
    found = load_file(ours / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.allclose(found[name], value, atol=1e-6), name


def test_plain_module_with_dict_batches(run: Any) -> None:
    theirs, ours = run("plain_module")
    same_results(theirs, ours)
    same_losses(theirs, ours)


def test_token_classification(run: Any, pieces: Pieces) -> None:
    theirs, ours = run("token_classification", "--model", pieces.bert)
    same_results(theirs, ours)
    same_losses(theirs, ours)


def test_a_trainer_with_parts_of_ones_own(run: Any, pieces: Pieces) -> None:
    theirs, ours = run("own_parts", "--model", pieces.bert)
    same_results(theirs, ours)
    same_losses(theirs, ours)
    expected, found = (json.loads((at / "told.json").read_text()) for at in (theirs, ours))
    for rates in ("rates", "last", "learning"):
        assert found.pop(rates) == pytest.approx(expected.pop(rates))
    assert found == expected
