"""Losses of the user's own, in training and in evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core.errors import BadInput, BadType, Notice
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments


class Classes(nn.Module):
    """A linear classifier that gives its loss where it gets labels."""

    def __init__(self, problem_type: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.config = SimpleNamespace(problem_type=problem_type)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.linear(x)
        if labels is None:
            return {"logits": logits}
        if labels.is_floating_point():
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        else:
            loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def samples(num: int = 20, several: bool = False) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    xs = torch.randn(num, 4, generator=draw)
    ys = xs[:, :3].argmax(dim=1)
    labels = nn.functional.one_hot(ys, 3).float() if several else ys
    return [{"x": x, "labels": y} for x, y in zip(xs, labels, strict=True)]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        logging_steps=1,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_loss_that_divides_by_the_items_evaluates_too(tmp_path: Path) -> None:
    def by_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        whole = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        return whole / num_items_in_batch

    plain = Trainer(Classes(), arguments(tmp_path), train_dataset=samples(), eval_dataset=samples())
    own = Trainer(
        Classes(),
        arguments(tmp_path),
        train_dataset=samples(),
        eval_dataset=samples(),
        compute_loss_func=by_items,
    )
    assert losses(own) == pytest.approx(losses(plain))
    assert own.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"])


class Older(Trainer):
    """A loss as it was written before steps counted their items."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


@pytest.mark.parametrize("micro", [1, 2])
def test_a_compute_loss_that_knows_no_items_is_called_without(tmp_path: Path, micro: int) -> None:
    options = {"gradient_accumulation_steps": micro}
    data: dict[str, Any] = {"train_dataset": samples(), "eval_dataset": samples()}
    plain = Trainer(Classes(), arguments(tmp_path, **options), **data)
    older = Older(Classes(), arguments(tmp_path, **options), **data)
    assert losses(older) == pytest.approx(losses(plain))
    assert older.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"])


def test_training_step_takes_the_items_as_a_number(tmp_path: Path) -> None:
    trainer = Trainer(Classes(), arguments(tmp_path))
    batch = torch.utils.data.default_collate(samples(4))
    half = trainer.training_step(trainer.model, batch, 8)
    assert float(half) == pytest.approx(float(trainer.training_step(trainer.model, batch)) / 2)


def test_labels_of_which_a_sample_has_several_are_not_softened(tmp_path: Path) -> None:
    with pytest.warns(Notice, match="Label smoothing is not compatible"):
        trainer = Trainer(
            Classes("multi_label_classification"),
            arguments(tmp_path, label_smoothing_factor=0.1),
            train_dataset=samples(several=True),
        )
    assert trainer.label_smoother is None
    assert trainer.train().training_loss > 0


class NamedY(Classes):
    """Calls its labels y."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(x, y)


def test_labels_of_any_name_are_softened_or_refused(tmp_path: Path) -> None:
    data = [{"x": row["x"], "y": row["labels"]} for row in samples()]
    args = arguments(tmp_path, label_smoothing_factor=0.2)
    plain = losses(Trainer(Classes(), args, train_dataset=samples()))
    named = arguments(tmp_path, label_smoothing_factor=0.2, label_names=["y"])
    assert losses(Trainer(NamedY(), named, train_dataset=data)) == pytest.approx(plain)
    with pytest.raises(BadInput, match=r"(?s)labels of a batch are not known.*batch has x, y"):
        Trainer(NamedY(), args, train_dataset=data).train()


def test_labels_that_are_no_classes_are_not_softened(tmp_path: Path) -> None:
    args = arguments(tmp_path, label_smoothing_factor=0.2)
    trainer = Trainer(Classes(), args, train_dataset=samples(several=True))
    with pytest.raises(BadInput, match=r"(?s)label_smoothing_factor.*float32 values"):
        trainer.train()


def test_arguments_of_another_library_are_refused_with_the_import_to_change(tmp_path: Path) -> None:
    import transformers

    theirs: Any = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(BadType, match="import TrainingArguments from where Trainer"):
        Trainer(Classes(), theirs)
