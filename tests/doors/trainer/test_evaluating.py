"""Evaluation and prediction: any model, any batch, every sample once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from anytrain.core.errors import BadInput, BadType, Notice
from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments
from equivalence import twins


class Places(nn.Module):
    """Takes its inputs by place: gives a loss and logits where it gets labels, else logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        logits = self.linear(x)
        return logits if y is None else (nn.functional.cross_entropy(logits, y), logits)


class Anything(Places):
    """Names nothing of what it takes."""

    def forward(self, **batch: Any) -> Any:  # type: ignore[override]  # that is the point
        return super().forward(batch["x"], batch.get("labels"))


class OnlyLogits(Places):
    """Knows no labels at all."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]  # that is the point
        return super().forward(x)


def pairs(num: int = 10) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(num, 4, generator=draw), torch.arange(num) % 2)


def named(label: str, num: int = 10) -> list[dict[str, torch.Tensor]]:
    return [{"x": x, label: y} for x, y in pairs(num)]


def build(tmp_path: Path, model: nn.Module, **given: Any) -> Any:
    sizes = {"max_steps": 2, "per_device_eval_batch_size": 4}
    return twins.build(twins.OURS, tmp_path, model=model, **{**sizes, **given})


def accuracy(prediction: Any) -> dict[str, float]:
    said = np.asarray(prediction.predictions).argmax(-1)
    return {"accuracy": float((said == prediction.label_ids).mean())}


def test_the_last_of_a_tuple_is_its_labels(tmp_path: Path) -> None:
    data = pairs()
    trainer = build(
        tmp_path, Places(), train_dataset=data, eval_dataset=data, compute_metrics=accuracy
    )
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_loss"] > 0
    assert 0 <= found["eval_accuracy"] <= 1
    predicted = trainer.predict(data)
    assert predicted.predictions.shape == (10, 2)
    assert predicted.label_ids.tolist() == data.tensors[1].tolist()
    assert predicted.metrics["test_accuracy"] == found["eval_accuracy"]


def test_inputs_without_labels_are_predicted_without_a_loss(tmp_path: Path) -> None:
    found = build(tmp_path, Places()).predict(TensorDataset(pairs().tensors[0]))
    assert found.predictions.shape == (10, 2)
    assert found.label_ids is None
    assert "test_loss" not in found.metrics


def test_an_own_loss_takes_the_last_of_a_tuple_from_the_model(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, labels)

    data = pairs()
    trainer = build(
        tmp_path, OnlyLogits(), train_dataset=data, eval_dataset=data, compute_loss_func=loss
    )
    assert trainer.train().training_loss > 0
    assert trainer.evaluate()["eval_loss"] > 0


def test_the_loss_that_a_model_gives_is_taken_whatever_its_labels_are_called(
    tmp_path: Path,
) -> None:
    by_y = build(tmp_path / "y", Places(), train_dataset=named("y"), eval_dataset=named("y"))
    by_y.train()
    assert by_y.evaluate()["eval_loss"] > 0
    anything = build(
        tmp_path / "any", Anything(), eval_dataset=named("labels"), compute_metrics=accuracy
    )
    assert {"eval_loss", "eval_accuracy"} <= anything.evaluate().keys()


def test_metrics_that_cannot_be_computed_are_told(tmp_path: Path) -> None:
    data = named("y")
    lost = build(tmp_path, Places(), eval_dataset=data, compute_metrics=accuracy)
    with pytest.warns(Notice, match=r"compute_metrics was not called.*label_names=\['y'\]"):
        assert "eval_accuracy" not in lost.evaluate()
    told = build(tmp_path, Places(), eval_dataset=data, compute_metrics=accuracy, label_names=["y"])
    assert "eval_accuracy" in told.evaluate()


def test_an_evaluation_that_finds_nothing_says_so(tmp_path: Path) -> None:
    trainer = build(tmp_path, OnlyLogits(), eval_dataset=TensorDataset(pairs().tensors[0]))
    with pytest.warns(Notice, match="found nothing: the model returned no loss"):
        trainer.evaluate()


def test_metrics_that_are_no_dict_are_refused(tmp_path: Path) -> None:
    trainer = build(tmp_path, Places(), eval_dataset=pairs(), compute_metrics=lambda p: None)
    with pytest.raises(BadType, match="returned a NoneType, not a dict"):
        trainer.evaluate()


def test_evaluation_sees_the_samples_that_training_drops(tmp_path: Path) -> None:
    seen: list[int] = []

    def count(prediction: Any) -> dict[str, float]:
        seen.append(len(prediction.label_ids))
        return {}

    trainer = build(
        tmp_path, Places(), eval_dataset=pairs(7), compute_metrics=count, dataloader_drop_last=True
    )
    trainer.evaluate()
    assert len(trainer.predict(pairs(7)).predictions) == 7
    assert seen == [7, 7]


def test_an_evaluation_without_a_training_tells_how_long_the_model_took(tmp_path: Path) -> None:
    trainer = build(tmp_path, Places(), train_dataset=pairs(), eval_dataset=pairs(7))
    assert trainer.evaluate()["eval_model_preparation_time"] >= 0
    assert trainer.predict(pairs(7)).metrics["test_model_preparation_time"] >= 0
    trained = build(tmp_path, Places(), train_dataset=pairs(), eval_dataset=pairs(7))
    trained.train()
    assert "eval_model_preparation_time" not in trained.evaluate()


def test_a_kept_loader_serves_the_trainers_own_data_set_given_by_hand(tmp_path: Path) -> None:
    own = pairs(7)
    workers = {"dataloader_persistent_workers": True, "dataloader_num_workers": 1}
    trainer = build(tmp_path, Places(), eval_dataset=own, **workers)
    assert trainer.get_eval_dataloader(own) is trainer.get_eval_dataloader()
    assert trainer.get_eval_dataloader(pairs(7)) is not trainer.get_eval_dataloader()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_loader_that_a_subclass_makes_is_kept_by_its_key(
    tmp_path: Path, persistent: bool
) -> None:
    class Own(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            if "own" in self._eval_dataloaders:
                return self._eval_dataloaders["own"]
            return self._get_dataloader(
                dataset=self.eval_dataset,
                description="Evaluation",
                batch_size=self.args.eval_batch_size,
                sampler_fn=self._get_eval_sampler,
                dataloader_key="own",
            )

    workers = {"dataloader_persistent_workers": persistent, "dataloader_num_workers": 1}
    trainer = build(tmp_path, Places(), kind=lambda base: Own, eval_dataset=pairs(7), **workers)
    assert (trainer.get_eval_dataloader() is trainer.get_eval_dataloader()) is persistent
    assert trainer.evaluate()["eval_samples_per_second"] > 0


def test_batches_of_an_evaluation_that_died_are_forgotten(tmp_path: Path) -> None:
    from anytrain.recipes.glue.scores import Scorer

    class Falls(Trainer):
        num_steps = 0

        def prediction_step(self, *given: Any, **more: Any) -> Any:
            self.num_steps += 1
            if self.num_steps == 2:
                raise RuntimeError("the disk is gone")
            loss, logits, labels = super().prediction_step(*given, **more)
            return loss, labels if self.num_steps > 2 else 1 - labels, labels

    trainer = build(
        tmp_path,
        Places(),
        kind=lambda base: Falls,
        eval_dataset=pairs(),
        compute_metrics=Scorer(["accuracy"]),
        batch_eval_metrics=True,
    )
    with pytest.raises(RuntimeError, match="the disk is gone"):
        trainer.evaluate()
    assert trainer.evaluate()["eval_accuracy"] == 1.0


def test_a_subclass_finds_what_it_counts_with(tmp_path: Path) -> None:
    seen = []

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            seen.append(self.current_gradient_accumulation_steps)
            return super().compute_loss(model, inputs, **more)

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            seen.append(f"logged at {self._globalstep_last_logged}")
            super().log(logs, start_time)

    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        logging_steps=1,
    )
    Own(Places(), args, train_dataset=pairs(6)).train()
    assert seen == [2, 2, "logged at 1", 1, "logged at 2", "logged at 2"]


def test_evaluations_without_data_are_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no eval_dataset"):
        build(tmp_path, Places(), eval_strategy="epoch", eval_dataset=None)

    class Own(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return super().get_eval_dataloader(pairs())

    args = TrainingArguments(str(tmp_path), eval_strategy="epoch", num_train_epochs=1)
    trainer = Own(Places(), args, train_dataset=pairs())
    trainer.train()
    assert "eval_loss" in trainer.state.log_history[-2]


def test_a_mistake_in_an_evaluation_costs_no_step(tmp_path: Path) -> None:
    given = {"train_dataset": named("labels"), "eval_dataset": named("labels"), "max_steps": 6}
    given |= dict.fromkeys(("save_strategy", "eval_strategy"), "steps")
    given |= dict.fromkeys(("save_steps", "eval_steps"), 3)

    def wrong(prediction: Any) -> dict[str, float]:
        return {"score": prediction.no_such_thing}

    with pytest.raises(AttributeError, match="no_such_thing") as caught:
        build(tmp_path, Anything(), **given, compute_metrics=wrong).train()
    assert "whose checkpoint was saved" in str(caught.value)
    trainer = build(tmp_path, Anything(), **given, compute_metrics=accuracy)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.state.global_step == 6


def test_a_metric_that_no_evaluation_gives_is_told_before_the_first_step(tmp_path: Path) -> None:
    given = {"train_dataset": named("labels"), "eval_dataset": named("labels")}
    given |= {"eval_strategy": "epoch", "metric_for_best_model": "accuracy"}
    trainer = build(tmp_path, Anything(), **given)
    with pytest.raises(KeyError, match=r"(?s)'eval_accuracy'.*without compute_metrics") as caught:
        trainer.train()
    assert trainer.state.global_step == 0
    assert "compute_metrics" in caught.value.fix

    class Own(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            known["metrics"]["eval_accuracy"] = 0.5

    own = build(tmp_path, Anything(), **given, callbacks=[Own()])
    own.train()
    assert own.state.best_metric == 0.5
    for name in ("loss", "eval_loss", "eval_runtime", "eval_samples_per_second"):
        build(tmp_path, Anything(), **{**given, "metric_for_best_model": name}).train()


def test_a_metric_that_an_evaluation_lacked_says_why_and_how_to_go_on_apart(
    tmp_path: Path,
) -> None:
    given = {"train_dataset": named("labels"), "eval_dataset": named("labels")}
    given |= dict.fromkeys(("save_strategy", "eval_strategy"), "steps")
    given |= dict.fromkeys(("save_steps", "eval_steps"), 1)
    given |= {"metric_for_best_model": "f1", "compute_metrics": accuracy}
    with pytest.raises(KeyError) as caught:
        build(tmp_path, Anything(), **given).train()
    assert caught.value.why.endswith("That was after step 1, whose checkpoint was saved.")
    assert caught.value.fix.endswith("pass resume_from_checkpoint=True to go on from there.")


def test_an_evaluation_of_nothing_is_told(tmp_path: Path) -> None:
    given = {"train_dataset": named("labels"), "eval_dataset": [], "eval_strategy": "epoch"}
    with pytest.warns(Notice, match="Nothing was evaluated: the data set is empty"):
        build(tmp_path, Anything(), **given).train()


class Told(Trainer):
    """Notes in which mode the model is when something is logged, or told to a callback."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.seen.append(("eval" if "eval_loss" in logs else "train", self.model.training))
        super().log(logs, start_time)


class ByHand(Told):
    """Calls the loop itself, and logs what it finds."""

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        found = self.evaluation_loop(self.get_eval_dataloader(), "Evaluation").metrics
        self.log(found)
        return found


@pytest.mark.parametrize("kind", [Told, ByHand])
def test_what_an_evaluation_found_is_logged_before_the_model_trains_again(kind, tmp_path) -> None:
    args = TrainingArguments(
        str(tmp_path), max_steps=3, eval_strategy="steps", eval_steps=1, logging_steps=1
    )
    trainer = kind(Places(), args, train_dataset=pairs(), eval_dataset=pairs())
    trainer.seen = []
    trainer.train()
    assert {mode for what, mode in trainer.seen if what == "eval"} == {False}
    assert [mode for what, mode in trainer.seen if what == "train"][:3] == [True] * 3


def test_a_dict_of_data_sets_by_datasets_is_several(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": [[0.0, 1.0, 2.0, 3.0]] * 5, "labels": [0, 1, 0, 1, 0]}
    whole = datasets.Dataset.from_dict(rows)
    both = datasets.DatasetDict(few=whole.select(range(2)), many=whole)
    found = build(tmp_path, Anything(), eval_dataset=both, remove_unused_columns=False).evaluate()
    assert {"eval_few_loss", "eval_many_loss"} <= set(found)
