"""Training on packed rows learns what training on padded ones does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from anytrain.core.errors import BadInput
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments
from equivalence import twins

ROWS = [
    {name: value[: 3 + number % 9] for name, value in row.items()}
    for number, row in enumerate(twins.texts(22, 12))
]


def train(folder: Path, make: Any, **given: Any) -> twins.Ran:
    return twins.train(
        twins.OURS,
        folder,
        model=make,
        train_dataset=twins.Mapped(ROWS),
        eval_dataset=twins.Mapped(ROWS),
        data_collator=twins.pad,
        eval_strategy="epoch",
        **given,
    )


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("make", [twins.gpt2, twins.llama])
def test_packed_rows_train_the_same_model(make: Any, accumulation: int, tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": accumulation}
    plain = train(tmp_path / "plain", make, **more)
    packed = train(tmp_path / "packed", make, packing=True, **more)
    for log in (plain.trainer.state.log_history, packed.trainer.state.log_history):
        log[-1].pop("total_flos")
    twins.assert_same_history(packed.history, plain.history, rtol=1e-4)
    twins.assert_same_weights(packed.weights, plain.weights, atol=1e-4)
    choice = packed.trainer._session.plan.shapes
    assert choice.value == "packed"
    assert "no row is padded" in choice.because


def test_a_model_that_is_no_causal_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a causal language model"):
        train(tmp_path, lambda: twins.bert("MaskedLM"), packing=True)


def test_a_model_whose_attention_mixes_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="mixes rows"):
        train(tmp_path, twins.llama, packing=True, use_cache=True)


@pytest.mark.parametrize("other", [{"length_buckets": 4}, {"neftune_noise_alpha": 5}])
def test_what_goes_by_the_length_of_rows_contradicts_packing(
    other: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="packing=True with"):
        TrainingArguments(str(tmp_path), packing=True, **other)


@dataclass
class Theirs(TrainingArguments):
    """Arguments of another library, which packs its rows itself (trl's SFTConfig has this one)."""

    packing: bool = False


def test_a_subclass_may_have_an_argument_of_that_name_itself(tmp_path: Path) -> None:
    args = Theirs(str(tmp_path), max_steps=1, save_strategy="no", packing=True)
    trainer = Trainer(twins.regression(), args, train_dataset=twins.points(8))
    assert trainer.train().global_step == 1
