"""Each contender trains the same job, here in one process and a few steps."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from anytrain.recipes.bench import child, rows, task
from anytrain.recipes.bench.comparison import CONTENDERS
from recipes.bench.test_settings import given

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which rows and weights are prepared."""
    found = tmp_path_factory.mktemp("prepared")
    given(max_steps=3, shapes=((4, 16),)).save(found / "settings.json")
    child.prepare(found)
    return found


@pytest.fixture(autouse=True)
def _forget_the_state_of_accelerate() -> object:
    """HF keeps the first precision of a process for good."""
    yield
    try:
        from accelerate.state import AcceleratorState, GradientState
    except ImportError:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# One of each library here; the others differ in precision and padding.
QUICK = ("anytrain", "anytrain-step", "hf", "accelerate-bf16", "fabric-bf16", "raw-bf16-sorted")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name, each in CONTENDERS.items()
        if not each.needs_cuda
    ],
)
def test_a_contender_trains_is_judged_and_measured(name: str, folder: Path) -> None:
    contender = CONTENDERS[name]
    pytest.importorskip(contender.library)
    told = child.Child(folder, contender, seed=1).measure(time.time())
    assert told["steps"] == 3
    assert told["precision"] in ("fp32", "bf16")
    assert contender.precision in (told["precision"], "auto")
    assert 0.6 < told["train_loss"] < 0.8
    assert told["first_step_s"] > 0
    assert 0 <= told["accuracy"] <= 1
    assert told["shapes"][0]["shape"] == "4x16"
    assert told["shapes"][0]["step_s"] > 0
    json.dumps(told)


def test_all_begin_with_the_same_weights_and_rows(folder: Path) -> None:
    settings = given()
    one, two = (task.load_model(settings, folder).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    train, held_out = rows.load(folder, "train"), rows.load(folder, "eval")
    assert len(train) == 192
    assert len(held_out) == 21
    assert train[5]["input_ids"].tolist() == rows.load(folder, "train")[5]["input_ids"].tolist()
    assert train[5]["input_ids"].tolist() != held_out[5]["input_ids"].tolist()


def test_made_up_rows_have_mrpcs_lengths(tmp_path: Path) -> None:
    rows.write(given(size="minilm"), tmp_path)
    lengths = rows.load(tmp_path, "train").lengths
    assert len(lengths) == 3668
    assert lengths.mean() == pytest.approx(53, abs=1)
    assert lengths.std() == pytest.approx(13, abs=1)
    assert lengths.max() <= 110


def test_made_up_rows_can_be_learnt_from(folder: Path) -> None:
    given(warm_up_steps=0).save(folder / "long.json")
    one = child.Child(folder, CONTENDERS["raw-bf16-sorted"], seed=1)
    long = one.task(60)
    trained = one.run(long)
    found = task.evaluate(long, trained.model, rows.load(folder, "eval"))
    assert found["accuracy"] > 0.8, "nine in ten labels are right"


def test_a_language_model_trains_too(tmp_path: Path) -> None:
    given(size="tiny-causal", length=64, batch_size=8, max_steps=2).save(tmp_path / "settings.json")
    child.prepare(tmp_path)
    for name in ("anytrain", "raw-bf16"):
        told = child.Child(tmp_path, CONTENDERS[name], seed=1).measure(time.time())
        assert told["train_loss"] == pytest.approx(np.log(200), abs=0.3)
        assert "accuracy" not in told


def test_operations_of_a_step_are_counted_by_hand() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32, num_labels=2,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    embedded = (50 + 32 + 2) * 8
    weights = sum(p.numel() for p in model.parameters()) - embedded
    assert task.flops_per_step(model, 4, 16) == 64 * (6 * weights + 12 * 2 * 8 * 16)


def test_batches_of_like_length_hold_each_row_once(folder: Path) -> None:
    one = child.Child(folder, CONTENDERS["raw-bf16-sorted"], seed=1)
    batches = list(one.task(1).loader().batch_sampler)
    assert sorted(n for batch in batches for n in batch) == list(range(192))
    assert len(batches) == len(one.task(1).loader())
