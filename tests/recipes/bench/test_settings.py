"""What a comparison is told, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from anytrain.core.errors import BadInput
from anytrain.recipes.bench import settings
from anytrain.recipes.bench.comparison import CONTENDERS, choose
from anytrain.recipes.bench.settings import BenchSettings


def given(**more: object) -> BenchSettings:
    usual = {
        "size": "tiny",
        "model": None,
        "data": None,
        "length": 128,
        "batch_size": 16,
        "epochs": 2,
        "learning_rate": 5e-3,
        "max_steps": 0,
        "warm_up_steps": 1,
        "cpu": True,
        "shapes": (),
        "shape_steps": (1, 2, 1),
    }
    return BenchSettings(**{**usual, **more})


def test_settings_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    written = given(shapes=((32, 128), (32, 48)))
    written.save(tmp_path / "settings.json")
    assert settings.load(tmp_path / "settings.json") == written


@pytest.mark.parametrize("text", ["32", "x", "32xlong", "0x128", "32x128;32x48"])
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="shape"):
        settings.read_shapes(text)


@pytest.mark.parametrize("text", ["30", "0,10,10", "1,0,1", "1,2,x"])
def test_counts_of_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="steps"):
        settings.read_steps(text)


def test_real_rows_need_a_tokenizer_and_folders_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tokenizer"):
        given(data=str(tmp_path)).check()
    with pytest.raises(BadInput, match="absent"):
        given(model=str(tmp_path / "absent")).check()
    with pytest.raises(BadInput, match="--model"):
        given(size="tiny-causal", model=str(tmp_path)).check()


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(BadInput, match="bert-base"):
        settings.check_size("huge")
    with pytest.raises(BadInput, match="raw-bf16"):
        choose("anytrain,nobody", even=False)


def test_contenders_are_those_asked_for_or_those_that_make_sense() -> None:
    assert [each.name for each in choose("raw-fp32, anytrain", even=False)] == [
        "raw-fp32",
        "anytrain",
    ]
    assert [each.name for each in choose("", even=False)] == list(CONTENDERS)
    assert {each.padding for each in choose("", even=True)} <= {"max", "buckets", "dynamic"}
    assert {each.precision for each in choose("", even=True)} == {"auto", "bf16"}
