"""The precision that arguments ask for when training begins is the one it is done in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.core.facts import Gain
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments
from anytrain.machine.backends import capabilities
from equivalence import twins


def build(folder: Path, **more: Any) -> Trainer:
    made: Trainer = twins.build(
        twins.OURS,
        folder,
        train_dataset=twins.sentences(8),
        eval_dataset=twins.sentences(8),
        num_train_epochs=1,
        **more,
    )
    return made


def dtype_of_logits(trainer: Trainer) -> torch.dtype:
    """Return what the model's matrix products give while it trains."""
    seen: list[torch.dtype] = []
    layer: Any = trainer.model.get_submodule("classifier")
    handle = layer.register_forward_hook(lambda module, given, found: seen.append(found.dtype))
    trainer.train()
    handle.remove()
    return seen[0]


def test_bf16_that_is_asked_for_after_construction_is_used_and_dropped(tmp_path: Path) -> None:
    trainer = build(tmp_path, model=twins.bert())
    trainer.args.bf16 = True
    assert dtype_of_logits(trainer) == torch.bfloat16
    trainer.args.bf16 = False
    assert dtype_of_logits(trainer) == torch.float32


def test_two_trainers_of_one_set_of_arguments_keep_a_session_each(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    first, second = (
        Trainer(twins.bert(), args, train_dataset=twins.sentences(8)) for _ in range(2)
    )
    args.max_steps, args.disable_tqdm, args.save_strategy = 1, True, "no"
    first.train()
    second.train()
    assert first._session is not second._session


def test_a_search_that_tried_bf16_leaves_no_trace_of_it(tmp_path: Path) -> None:
    trainer = build(tmp_path, model_init=twins.bert, eval_strategy="epoch")
    trainer.hyperparameter_search(
        lambda trial: {"bf16": trial.suggest_categorical("bf16", [True])}, n_trials=1
    )
    assert trainer.args.bf16 is False
    assert trainer.accelerator.mixed_precision == "no"
    trainer.train()
    assert trainer.accelerator.mixed_precision == "no"


def test_an_evaluation_in_bf16_gives_the_weights_back_as_they_were(tmp_path: Path) -> None:
    trainer = build(tmp_path, model=twins.bert(), bf16_full_eval=True)
    seen: set[torch.dtype] = set()
    trainer.model.register_forward_hook(
        lambda module, given, found: seen.update(p.dtype for p in module.parameters())
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.evaluate()
    assert seen == {torch.bfloat16}
    for name, p in trainer.model.named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, before[name]), name
    seen.clear()
    trainer.train()
    assert seen == {torch.float32}


def test_a_checkpoints_precision_beats_a_figure_that_was_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = iter((2.0, 0.5))
    monkeypatch.setattr(capabilities, "bf16_gain", lambda _: Gain(next(figure), "2026-11-15"))
    first = build(
        tmp_path,
        model=twins.bert(),
        precision="auto",
        save_strategy="steps",
        save_steps=1,
        max_steps=1,
    )
    first.train()
    assert first.accelerator.plan.precision.value == "bf16"
    second = build(tmp_path, model=twins.bert(), precision="auto", max_steps=2)
    assert second.accelerator.plan.precision.value == "no"
    second.train(resume_from_checkpoint=True)
    found = second.accelerator.plan.precision
    assert found.value == "bf16"
    assert "checkpoint" in found.because
