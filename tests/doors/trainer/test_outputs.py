from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from anytrain.core.errors import BadInput, Notice
from anytrain.doors.trainer import outputs
from anytrain.engine.checkpoint import Snapshot, Store


def saved(folder: Path, *steps: int) -> None:
    store = Store(folder)
    for step in steps:
        store.save(f"checkpoint-{step}", Snapshot(step=step, models=[torch.nn.Linear(2, 2)]))


def test_a_prediction_unpacks_into_what_is_there() -> None:
    predictions, labels = outputs.EvalPrediction(np.ones(3), np.zeros(3))
    assert predictions.sum() == 3
    assert labels.sum() == 0
    with_inputs = outputs.EvalPrediction("p", "l", inputs="i")
    assert list(with_inputs) == ["p", "l", "i"]
    assert with_inputs[2] == "i"
    with pytest.raises(IndexError, match="no element 3"):
        with_inputs[3]


def test_losses_come_last_even_without_inputs() -> None:
    assert list(outputs.EvalPrediction("p", "l", losses="x")) == ["p", "l", "x"]


def test_the_last_checkpoint_has_the_highest_step_not_the_last_name(tmp_path: Path) -> None:
    saved(tmp_path, 900, 1000)
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-2000").write_text("a file")
    assert outputs.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1000")


def test_the_last_checkpoint_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    saved(tmp_path, 8, 20, 12)  # as where a run went on from step 8 once more
    shutil.copytree(tmp_path / "checkpoint-12", tmp_path / "a-copy")
    assert outputs.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-12")
    assert outputs.last_checkpoint(tmp_path).path == tmp_path / "checkpoint-12"


def test_another_trainers_checkpoints_count_where_there_is_none_of_ours(tmp_path: Path) -> None:
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-15").mkdir()
    assert outputs.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    saved(tmp_path, 7)
    assert outputs.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-7")


def test_a_checkpoint_of_ours_without_a_manifest_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "checkpoint-2/cursor.json").write_text("{}")
    (tmp_path / "checkpoint-2/manifest.json").unlink()
    with pytest.warns(Notice, match="checkpoint-2 is passed over"):
        assert outputs.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


def test_a_folder_without_checkpoints_has_no_last_one(tmp_path: Path) -> None:
    assert outputs.get_last_checkpoint(tmp_path) is None


def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"cut")
    with pytest.warns(Notice, match=r"checkpoint-2 is passed over: model\.safetensors"):
        found = outputs.get_last_checkpoint(str(tmp_path))
    assert found == str(tmp_path / "checkpoint-1")


def test_a_checkpoint_that_another_trainer_wrote_counts(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    assert outputs.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")


def test_speed_counts_what_was_done_each_second() -> None:
    found = outputs.speed_metrics("eval", time.time() - 2, num_samples=100, num_steps=10)
    assert found["eval_runtime"] == pytest.approx(2, abs=0.2)
    assert found["eval_samples_per_second"] == pytest.approx(50, rel=0.1)
    assert found["eval_steps_per_second"] == pytest.approx(5, rel=0.1)
    assert "eval_tokens_per_second" not in found


def test_metrics_are_shown_as_people_read_them() -> None:
    raw = {
        "train_runtime": 3661.239,
        "train_mem_cpu_alloc_delta": 5 << 20,
        "total_flos": float(3 << 30),
        "loss": 0.123456,
        "step": 7,
    }
    assert outputs.metrics_format(raw) == {
        "train_runtime": "1:01:01.23",
        "train_mem_cpu_alloc_delta": "5MB",
        "total_flos": "3GF",
        "loss": 0.1235,
        "step": 7,
    }


def test_metrics_become_plain_numbers() -> None:
    nested = {"a": np.float32(0.5), "b": [torch.tensor(3), (np.int64(2),)], "c": "word"}
    plain = outputs.denumpify_detensorize(nested)
    assert plain == {"a": 0.5, "b": [3, (2,)], "c": "word"}
    assert type(plain["a"]) is float
    many = torch.ones(2)
    assert outputs.denumpify_detensorize(many) is many


def test_the_objective_is_the_sum_of_metrics_or_the_loss() -> None:
    both = {"eval_loss": 2.0, "eval_f1": 0.5, "eval_accuracy": 0.25, "epoch": 3.0}
    speed = {"eval_runtime": 9.0, "eval_samples_per_second": 9.0}
    assert outputs.default_compute_objective({**both, **speed}) == 0.75
    assert outputs.default_compute_objective({"eval_loss": 2.0, "epoch": 1.0, **speed}) == 2.0
    with pytest.raises(BadInput, match="nothing to compare"):
        outputs.default_compute_objective(speed)


def test_length_is_asked_and_never_assumed() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    assert outputs.has_length([1])
    assert not outputs.has_length(Endless())


def test_a_seed_gives_the_same_draws_again() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    outputs.set_seed(7)
    first = draw()
    outputs.set_seed(7)
    assert draw() == first


def test_full_determinism_asks_torch_for_it() -> None:
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    try:
        outputs.enable_full_determinism(3, warn_only=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def test_workers_of_two_ranks_draw_differently() -> None:
    torch.manual_seed(1)
    outputs.seed_worker(0, num_workers=2, rank=0)
    first = torch.rand(())
    torch.manual_seed(1)
    outputs.seed_worker(0, num_workers=2, rank=1)
    assert torch.rand(()) != first
