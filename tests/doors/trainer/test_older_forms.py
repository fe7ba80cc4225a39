"""Methods that a script overrides in the form they had in transformers 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from anytrain.core.errors import NotFinite
from anytrain.doors.trainer import Trainer
from equivalence import twins


def build(tmp_path: Path, kind: Any = None, **given: Any) -> Any:
    return twins.build(
        twins.OURS,
        tmp_path,
        kind=None if kind is None else lambda base: kind,
        **{
            "model": twins.regression(),
            "train_dataset": twins.points(10),
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            **given,
        },
    )


def weights(trainer: Any) -> list[torch.Tensor]:
    trainer.train()
    return [p.detach().clone() for p in trainer.model.parameters()]


class OldStep(Trainer):
    num_calls = 0

    def training_step(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
        self.num_calls += 1
        return super().training_step(model, inputs)


class OldLog(Trainer):
    def log(self, logs: dict[str, Any]) -> None:  # type: ignore[override]
        logs["more"] = 1
        super().log(logs)


class OldSampler(Trainer):
    def _get_train_sampler(self) -> Any:  # type: ignore[override]
        return SequentialSampler(self.train_dataset)


class Counting(Trainer):
    """A counter of its own, as trainers of reinforcement learning keep one."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._step = 0

    def training_step(self, *given: Any, **more: Any) -> Any:
        self._step += 1
        return super().training_step(*given, **more)


def test_a_counter_named_step_is_the_subclass_s_own(tmp_path: Path) -> None:
    trainer = build(tmp_path, Counting)
    trainer.train()
    assert trainer._step == 5


def test_a_training_step_without_items_learns_the_same(tmp_path: Path) -> None:
    old = build(tmp_path / "old", OldStep)
    for mine, plain in zip(weights(old), weights(build(tmp_path / "new")), strict=True):
        assert torch.equal(mine, plain)
    assert old.num_calls == 5


def test_a_step_in_the_old_form_is_replayed_too(tmp_path: Path) -> None:
    class Nan(OldStep):
        def compute_loss(self, *given: Any, **more: Any) -> Any:
            return super().compute_loss(*given, **more) * float("nan")

    with pytest.raises(NotFinite, match="step 1"):
        build(tmp_path, Nan).train()


def test_a_log_without_a_start_time_is_called(tmp_path: Path) -> None:
    trainer = build(tmp_path, OldLog)
    trainer.train()
    assert all(entry["more"] == 1 for entry in trainer.state.log_history)


def test_a_train_sampler_without_a_data_set_is_asked(tmp_path: Path) -> None:
    old = build(tmp_path / "old", OldSampler, train_sampling_strategy="random")
    for mine, plain in zip(weights(old), weights(build(tmp_path / "new")), strict=True):
        assert torch.equal(mine, plain)
