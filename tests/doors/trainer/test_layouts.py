"""What a training goes on with when its steps are laid out otherwise, or end in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import WeightedRandomSampler

from anytrain.core.errors import BadInput, NotFinite, Notice
from anytrain.doors.callbacks import EarlyStoppingCallback, TrainerCallback
from equivalence import twins


class Numbered(nn.Module):
    """Take down which samples were trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[list[int]] = []

    def forward(self, number: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training:
            self.seen.append(number.tolist())
        return {"loss": (self.weight * number.float()).mean(), "logits": number}


def numbers(count: int) -> list[dict[str, int]]:
    return [{"number": n, "labels": n} for n in range(count)]


def build(folder: Path, count: int = 16, **given: Any) -> Any:
    chosen = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 4, **given}
    return twins.build(twins.OURS, folder, model=Numbered(), train_dataset=numbers(count), **chosen)


def test_another_batch_size_goes_on_at_the_next_unseen_sample(tmp_path: Path) -> None:
    build(tmp_path, num_train_epochs=1, max_steps=2, save_steps=1, save_strategy="steps").train()
    second = build(tmp_path, num_train_epochs=1, per_device_train_batch_size=8)
    with pytest.warns(Notice, match="4 samples in a batch"):
        second.train(resume_from_checkpoint=True)
    assert second.model.seen == [[8, 9, 10, 11, 12, 13, 14, 15]]
    assert second.state.global_step == second.state.max_steps == 3


def test_another_accumulation_trains_on_all_that_is_left_and_ends_its_schedule(
    tmp_path: Path,
) -> None:
    build(
        tmp_path,
        32,
        max_steps=2,
        gradient_accumulation_steps=2,
        save_steps=2,
        save_strategy="steps",
    ).train()
    second = build(tmp_path, 32, num_train_epochs=1, gradient_accumulation_steps=4)
    with pytest.warns(Notice, match="2 batches in a step"):
        second.train(resume_from_checkpoint=True)
    assert [n for batch in second.model.seen for n in batch] == list(range(16, 32))
    assert second.state.global_step == second.state.max_steps == 3
    assert second.get_learning_rates() == [0.0, 0.0]


class Ends(TrainerCallback):
    """Count ends of epochs; leave the first one early if asked."""

    def __init__(self, leave_at: int | None = None) -> None:
        self.leave_at = leave_at
        self.ends: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        control.should_epoch_stop = state.global_step == self.leave_at

    def on_epoch_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.ends.append(state.global_step)


def test_a_finished_training_that_is_given_more_epochs_ends_each_once(tmp_path: Path) -> None:
    build(tmp_path, num_train_epochs=1, save_strategy="epoch").train()
    ends = Ends()
    longer = build(tmp_path, num_train_epochs=2, save_strategy="epoch", callbacks=[ends])
    longer.train(resume_from_checkpoint=True)
    assert ends.ends == [8]


def test_a_resume_goes_on_after_an_epoch_that_was_left(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", num_train_epochs=2, callbacks=[Ends(leave_at=1)])
    whole.train()
    given = {"save_strategy": "epoch", "callbacks": [Ends(leave_at=1)]}
    build(tmp_path / "cut", num_train_epochs=1, **given).train()
    resumed = build(tmp_path / "cut", num_train_epochs=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == 5
    assert resumed.model.seen == whole.model.seen[1:]


def test_early_stopping_counts_an_evaluation_once_over_two_lives(tmp_path: Path) -> None:
    def trainer(folder: Path, epochs: int) -> Any:
        return build(
            folder,
            num_train_epochs=epochs,
            eval_dataset=numbers(4),
            eval_strategy="epoch",
            save_strategy="epoch",
            learning_rate=0.0,
            metric_for_best_model="loss",
            load_best_model_at_end=True,
            restore_callback_states_from_checkpoint=True,
            callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        )

    whole = trainer(tmp_path / "whole", 9)
    whole.train()
    trainer(tmp_path / "cut", 2).train()
    resumed = trainer(tmp_path / "cut", 9)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step


def test_a_sampler_that_is_shorter_than_its_data_loses_nothing(tmp_path: Path) -> None:
    trainer = build(tmp_path, 17, num_train_epochs=1)
    trainer._get_train_sampler = lambda dataset=None: WeightedRandomSampler([1.0] * 17, 10)
    trainer.train()
    assert [len(batch) for batch in trainer.model.seen] == [4, 4, 2]


def test_gradients_that_were_left_behind_take_no_part(tmp_path: Path) -> None:
    given = {"train_dataset": twins.points(8), "max_steps": 1}
    fresh = twins.train(twins.OURS, tmp_path / "a", model=twins.regression, **given)
    trainer = twins.build(twins.OURS, tmp_path / "b", model=twins.regression(), **given)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] == fresh.history[0]["grad_norm"]


def test_no_batch_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no batch"):
        build(tmp_path, 3, num_train_epochs=1, dataloader_drop_last=True).train()


class InfiniteConstant(nn.Module):
    """A loss that is infinite while its gradient is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": self.weight.sum() + float("inf")}


def test_an_infinite_loss_with_a_finite_gradient_moves_nothing(tmp_path: Path) -> None:
    model = InfiniteConstant()
    rows = twins.points(8)
    trainer = twins.build(twins.OURS, tmp_path, model=model, train_dataset=rows, max_steps=2)
    with pytest.raises(NotFinite, match="step 1"):
        trainer.train()
    assert torch.equal(model.weight.detach(), torch.ones(3))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_without_a_counted_label_is_no_bad_step(tmp_path: Path, accumulation: int) -> None:
    rows = twins.sentences(8)
    for row in rows[:4]:
        row["labels"] = -100
    ran = twins.train(
        twins.OURS,
        tmp_path,
        model=twins.bert,
        train_dataset=rows,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
    )
    losses = [entry["loss"] for entry in ran.history if "loss" in entry]
    assert losses[0] == 0 if accumulation == 1 else losses[0] > 0
