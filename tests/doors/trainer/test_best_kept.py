"""The best checkpoint stays, whenever it was saved and evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anytrain.core.errors import BadType, Notice
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.checkpoint import files
from anytrain.engine.checkpoint.manifest import read


class Point(nn.Module):
    """One number, drawn to the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(()))

    def forward(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.at - labels) ** 2).mean(), "at": self.at.expand(len(labels))}


def trained(folder: Path, scores: list[Any], **options: Any) -> Trainer:
    """Train 6 steps of 2 epochs; evaluations give the scores in turn."""
    coming = iter(scores)
    data = [{"labels": float(i)} for i in range(6)]
    trainer = Trainer(
        Point(),
        TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=2,
            per_device_train_batch_size=2,
            metric_for_best_model="score",
            report_to="none",
            disable_tqdm=True,
            **options,
        ),
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=lambda prediction: {"score": next(coming)},
    )
    trainer.train()
    return trainer


def kept(folder: Path) -> list[int]:
    return sorted(int(found.name.partition("-")[2]) for found in folder.glob("checkpoint-*"))


def test_a_best_model_that_was_saved_before_it_was_evaluated_is_known(tmp_path: Path) -> None:
    # A save at step 3 comes before the evaluation at the epoch's end, which is at step 3 too.
    trainer = trained(
        tmp_path, [0.9, 0.1], eval_strategy="epoch", save_strategy="steps", save_steps=1
    )
    assert trainer.state.best_global_step == 3
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")


@pytest.mark.parametrize(("limit", "left"), [(2, [2, 6]), (1, [2])])
def test_the_best_is_kept_without_being_loaded_at_the_end(
    tmp_path: Path, limit: int, left: list[int]
) -> None:
    trainer = trained(
        tmp_path,
        [0.5, 0.9, 0.1, 0.2, 0.3, 0.4],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=limit,
    )
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert kept(tmp_path) == left


@pytest.mark.parametrize("way", ["relative", "linked"])
def test_the_best_is_kept_in_a_folder_by_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("real").mkdir()
    Path("linked").symlink_to("real")
    trainer = trained(
        Path("real" if way == "relative" else "linked"),
        [0.9, 0.5, 0.4, 0.3, 0.2, 0.1],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
    )
    assert (
        Path(trainer.state.best_model_checkpoint or "").resolve() == tmp_path / "real/checkpoint-1"
    )
    assert kept(tmp_path / "real") == [1, trainer.state.global_step]


def test_a_checkpoint_tells_only_the_metric_of_its_own_step(tmp_path: Path) -> None:
    trained(
        tmp_path,
        [0.5, 0.9, 0.7],
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=1,
    )
    told = {step: read(tmp_path / f"checkpoint-{step}").metrics for step in (1, 2, 3, 4)}
    assert told == {1: {}, 2: {"eval_score": 0.5}, 3: {}, 4: {"eval_score": 0.9}}


def test_the_accelerator_of_a_trainer_tells_how_it_deals_batches(tmp_path: Path) -> None:
    def settings(config: dict[str, Any] | None) -> tuple[Any, ...]:
        arguments = TrainingArguments(output_dir=str(tmp_path), accelerator_config=config)
        told = Trainer(Point(), arguments).accelerator
        return told.split_batches, told.even_batches, told.use_seedable_sampler

    assert settings(None) == (False, True, True)
    assert settings({"split_batches": True, "even_batches": False}) == (True, False, True)


def test_memory_of_the_trainers_own_making_is_told_once(tmp_path: Path) -> None:
    trainer = Trainer(
        Point(),
        TrainingArguments(output_dir=str(tmp_path), skip_memory_metrics=False, max_steps=1),
        train_dataset=[{"labels": 1.0}],
        eval_dataset=[{"labels": 1.0}],
    )
    assert "init_mem_cpu_alloc_delta" in trainer.train().metrics
    metrics = trainer.evaluate()
    assert "eval_mem_cpu_alloc_delta" in metrics
    assert "init_mem_cpu_alloc_delta" not in metrics


@pytest.mark.parametrize("limit", [0, -1, None])
def test_a_limit_below_one_is_none(tmp_path: Path, limit: int | None) -> None:
    trained(tmp_path, [0.5, 0.9, 0.1], save_strategy="steps", save_steps=1, save_total_limit=limit)
    assert len(kept(tmp_path)) > 2


def test_a_users_copy_outlives_the_end_of_a_run_that_keeps_one(tmp_path: Path) -> None:
    mine = tmp_path / "checkpoint-2-mine"
    mine.mkdir()
    (mine / "manifest.json").write_text("{}")
    trained(
        tmp_path,
        [0.5, 0.9, 0.1, 0.2, 0.3, 0.4],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
    )
    assert (mine / "manifest.json").exists()


@pytest.mark.parametrize(
    ("score", "named"),
    [
        (torch.tensor([0.5, 0.2]), r"a Tensor of shape \(2,\)"),
        ({"x": 1}, "a dict"),
        ("high", "a str"),
        (None, "a NoneType"),
    ],
    ids=["vector", "dict", "text", "none"],
)
def test_a_score_that_is_no_number_is_refused_after_its_step_is_saved(
    tmp_path: Path, score: Any, named: str
) -> None:
    with pytest.raises(BadType, match=f"best model by 'eval_score': it is {named}"):
        trained(tmp_path, [score], eval_strategy="epoch", save_strategy="epoch")
    assert kept(tmp_path) == [3]


@pytest.mark.parametrize("score", [torch.tensor(0.5), np.float32(0.5), np.array(0.5), True])
def test_a_score_of_one_element_is_a_number(tmp_path: Path, score: Any) -> None:
    trainer = trained(tmp_path, [score, 0.1], eval_strategy="epoch", save_strategy="epoch")
    assert trainer.state.best_global_step == 3
    assert isinstance(trainer.state.best_metric, (int, float))


def test_scores_that_are_all_nan_are_told_as_such(tmp_path: Path) -> None:
    nan = float("nan")
    asked = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    with pytest.warns(Notice, match="found no best model: every eval_score was NaN"):
        trained(tmp_path, [nan, nan], **asked)


def test_the_best_model_is_kept_in_memory_where_it_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(path: Any) -> int:
        return 0 if (tmp_path / "checkpoint-3").exists() else 2**40

    monkeypatch.setattr(files, "free_bytes", fill)
    with pytest.warns(Notice, match="It is the one in memory, and stays"):
        trainer = trained(
            tmp_path, [0.1, 0.9], eval_strategy="epoch", save_strategy="epoch",
            load_best_model_at_end=True, greater_is_better=True,
        )  # fmt: skip
    assert kept(tmp_path) == [3]
    whole = trained(tmp_path / "whole", [0.1, 0.9], eval_strategy="epoch", save_strategy="no")
    assert torch.equal(trainer.model.at, whole.model.at)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
