"""Loaders and settings that subclasses of a Trainer bring along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from anytrain.core.errors import BadInput, Notice
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments


class Line(nn.Module):
    """y = a x + b, by the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.a * x + self.b
        return {"loss": nn.functional.mse_loss(y, labels), "y": y}


def points(num: int = 32) -> list[dict[str, float]]:
    xs = torch.linspace(-1, 1, num).tolist()
    return [{"x": x, "labels": 2 * x + 1} for x in xs]


class Joined:
    """Two loaders, one after the other: an iterable that is no DataLoader."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        return sum(len(loader) for loader in self.loaders)

    def __iter__(self) -> Any:
        for loader in self.loaders:
            yield from loader


class TwoLoaders(Trainer):
    """Train and evaluate on everything twice."""

    def get_train_dataloader(self) -> Any:
        return Joined(super().get_train_dataloader(), super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        whole = super().get_eval_dataloader
        return Joined(whole(eval_dataset), whole(eval_dataset))


class Accelerated(Trainer):
    """Prepare the loader by hand, as subclasses written for HF's Trainer do."""

    def get_train_dataloader(self) -> Any:
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset, batch_size=self._train_batch_size, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        learning_rate=0.1,
        num_train_epochs=2,
        report_to="none",
        disable_tqdm=True,
        **options,
    )


def test_batches_may_come_from_any_iterable(tmp_path: Path) -> None:
    told: list[bool] = []

    def compute(prediction: Any, compute_result: bool) -> dict[str, float]:
        told.append(compute_result)
        return {"batches": len(told)} if compute_result else {}

    trainer = TwoLoaders(
        Line(),
        arguments(tmp_path, batch_eval_metrics=True, per_device_eval_batch_size=8),
        train_dataset=points(),
        eval_dataset=points(),
        compute_metrics=compute,
    )
    output = trainer.train()
    assert output.global_step == 16
    assert trainer.evaluate()["eval_batches"] == 8
    assert told == [False] * 7 + [True]


def test_a_run_over_any_iterable_resumes_where_it_was(tmp_path: Path) -> None:
    def run(resume: str | None) -> Line:
        trainer = TwoLoaders(Line(), arguments(tmp_path, save_steps=3), train_dataset=points())
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model  # type: ignore[return-value]  # the Line that went in

    whole = run(None)
    with pytest.warns(Notice, match="Reading 3 batches again"):
        resumed = run(str(tmp_path / "checkpoint-3"))
    assert torch.equal(whole.a, resumed.a)
    assert torch.equal(whole.b, resumed.b)


def test_a_loader_prepared_by_the_trainers_accelerator_is_taken(tmp_path: Path) -> None:
    trainer = Accelerated(Line(), arguments(tmp_path), train_dataset=points())
    assert trainer.train().global_step == 8


def test_a_finished_run_that_is_resumed_does_no_more_steps(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 3, "save_steps": 3}
    first = Trainer(Line(), arguments(tmp_path, **options), train_dataset=points())
    first.train()
    again = Trainer(Line(), arguments(tmp_path, **options), train_dataset=points())
    assert again.train(resume_from_checkpoint=True).global_step == 3
    assert torch.equal(first.model.a, again.model.a)  # type: ignore[arg-type]


def test_what_was_not_given_is_a_bad_input(tmp_path: Path) -> None:
    trainer = Trainer(Line(), arguments(tmp_path))
    with pytest.raises(BadInput, match="no train_dataset"):
        trainer.train()
    with pytest.raises(BadInput, match="no eval_dataset"):
        trainer.evaluate()
    with pytest.raises(BadInput, match="no optimizer yet"):
        trainer.get_learning_rates()


class Growing(Line):
    """Remember every x in a buffer that grows, and let it grow before it is loaded."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen = torch.cat([self.seen, x.detach()])
        return super().forward(x, labels)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict, strict, assign)


def test_a_model_that_loads_in_its_own_way_may_grow_first(tmp_path: Path) -> None:
    def run(resume: str | None) -> torch.Tensor:
        trainer = Trainer(Growing(), arguments(tmp_path, save_steps=3), train_dataset=points())
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.seen  # type: ignore[return-value]

    assert torch.equal(run(None), run(str(tmp_path / "checkpoint-3")))


class PreparesItself(Trainer):
    """Prepares the loader that it evaluates on, as trainers of other libraries do."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.accelerator.prepare(
            DataLoader(self.eval_dataset, batch_size=8, collate_fn=self.data_collator)
        )


def prepares_itself(folder: Path) -> PreparesItself:
    args = TrainingArguments(
        str(folder), max_steps=6, eval_strategy="steps", eval_steps=2, save_steps=2, seed=3
    )
    return PreparesItself(Line(), args, train_dataset=points(), eval_dataset=points())


def test_a_run_that_prepares_loaders_to_evaluate_on_resumes(tmp_path: Path) -> None:
    whole = prepares_itself(tmp_path / "run")
    whole.train()
    again = prepares_itself(tmp_path / "run")
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert again.state.global_step == 6
    assert torch.equal(again.model.a, whole.model.a) and torch.equal(again.model.b, whole.model.b)
